"""The supervisor and its processes exchange these messages, a line of JSON each.

Orders go down the child's stdin, which then stays open as long as the supervisor lives. Reports come up a
pipe of their own. Neither is seen by other users of the machine, as arguments would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from kvloom.cluster.edits import Edit
from kvloom.cluster.launcher import Change, Counted, Edited, Snapshot, UnitSeen
from kvloom.config.tls import TlsFiles
from kvloom.journal.records import Journaled, Noted
from kvloom.types.files import replacing
from kvloom.types.request import ModelCard
from kvloom.types.service import PATIENCE
from kvloom.types.spec import EngineSpec, ProgramSpec, SchedulerSpec


class EngineOrder(Struct, frozen=True, kw_only=True):
    """The order to an engine: the specification that it is to serve."""

    spec: EngineSpec
    socket: str
    """The path at which it serves the verbs."""
    secret: str
    """The secret that callers must know."""
    host: str = ""
    """The address at which it serves them to other hosts as well; empty if there are none."""
    identity: TlsFiles | None = None
    """The certificate by which it and its callers on other hosts know each other."""
    running: str = ""
    """The file by which it counts as running for the host's next keeper; empty if there is none."""
    lease: float | None = None
    """The time at which it is to end unless it has heard of a `Lease` by then; None if it ends with its
    supervisor alone."""


class GatewaySpec(Struct, frozen=True, kw_only=True):
    """The settings that all gateways of a fleet have, on whichever host."""

    host: str = ""
    """The address at which clients connect."""
    port: int = 0
    api_keys: dict[str, int | None]
    """Keys without names."""
    max_body: int
    max_connections: int
    """The most connections of one address."""
    program: ProgramSpec
    """The config's router program, which runs if no other one is set."""
    folder: str
    """The folder in which a program of the user's own is looked for."""
    admin_keys: frozenset[str] = frozenset()
    keys: str = ""
    """The file of keys with names; empty if there is none."""
    share_prefixes: Literal["auto", "all", "key"] = "auto"
    access_log: bool = False
    """Whether a line is logged for each request."""
    otlp: str = ""
    """The address to which traces are sent; if it is empty, none are."""
    audit_file: str = ""
    """The file to which the audit trail is written; empty for the log."""
    traffic: str = ""
    """The folder of a host in which the traffic is kept; empty for the fleet's own folder, which ends with
    the fleet."""
    memory: int = 0
    """Bytes that were free, on all machines of the fleet together, before it began."""
    cores: int = 0
    """The cores of all machines of the fleet."""
    drain: float = 60.0
    """Seconds for which requests at a unit that is to restart or to stop are waited for."""
    patience: float = PATIENCE
    """Seconds for which a request waits for a unit."""
    tls: TlsFiles | None = None
    """The certificates with which callers are spoken to; None for plain HTTP."""
    proxies: tuple[str, ...] = ()
    """Addresses and networks of proxies that speak for others."""
    allow_origins: tuple[str, ...] = ()
    """Origins of pages that may ask from a browser, besides the gateway's own."""
    request_timeout: float | None = None
    """Seconds that a request may take."""


class GatewayOrder(GatewaySpec, frozen=True, kw_only=True):
    """Tells a gateway what it needs before it may serve. It prepares itself, and waits for a `Snapshot` of
    the fleet."""

    secret: str
    """The secret by which engines know it."""
    listeners: tuple[int, ...]
    """The descriptors of the listening sockets, which it inherits."""
    sockets: str
    """The folder of the engines' sockets."""
    node: str = ""
    """The node that it is on: engines there are called at their sockets. Empty on one host."""
    address: str = ""
    """The address of its host at which it answers the fleet's own processes of other hosts; empty if there
    are none."""
    identity: TlsFiles | None = None
    """The certificate by which it and processes on other hosts know each other."""


class SchedulerOrder(Struct, frozen=True, kw_only=True):
    """Tells a fleet scheduler what it needs."""

    spec: SchedulerSpec
    gateway: str = ""
    """The path of the socket at which the gateway answers the fleet's own processes; empty if gateways are
    on nodes, of which `Gateways` tells."""
    secret: str
    """The secret by which gateways know it."""
    sockets: str
    """The fleet's own folder, in which the engines' sockets are."""
    identity: TlsFiles | None = None
    """The certificate by which it and gateways on nodes know each other."""


class Lease(Struct, frozen=True, tag="lease"):
    """Tells an engine until when it may serve, by `leased_time`. One that hears of no other lease ends then,
    because its unit may get another process on another host."""

    until: float


class Gateways(Struct, frozen=True, tag="gateways"):
    """Tells the fleet scheduler of all gateways on nodes."""

    endpoints: tuple[str, ...]
    """The addresses at which they answer the fleet's own processes."""


class RetireOrder(Struct, frozen=True, tag="retire"):
    """Tells a gateway that another one serves in its place, and that it is to end with the last of its
    requests."""


class StartProgress(Struct, frozen=True, tag="progress"):
    """The process tells what it is doing now."""

    text: str


class Ready(Struct, frozen=True, tag="ready"):
    """The process answers."""

    routes: dict[str, str] = {}
    """The route under /v1 at which each of its models is asked, if it has any."""
    endpoint: str = ""
    """The address at which it answers other hosts; empty if it does not."""


class Alive(Struct, frozen=True, tag="alive"):
    """The process's event loop turns."""


class OrderRefused(Struct, frozen=True, tag="refused"):
    """The process ends, because what it was given cannot be used."""

    message: str


Said = Edit | UnitSeen | Counted
"""A message of a gateway to the fleet's controller."""
GatewayNews = Snapshot | Change | Edited | Journaled | RetireOrder
"""A message to a gateway while it serves."""
Told = GatewayNews | Lease | Gateways
"""A message to a process after its order."""
Order = EngineOrder | GatewayOrder | SchedulerOrder | Told
ChildReport = StartProgress | Ready | Alive | OrderRefused | Said | Noted


def keep_cards(folder: Path, unit: str, cards: Sequence[ModelCard]) -> None:
    """Keeps a unit's model cards for gateways of this host that come when it has no process. A card holds a
    tokenizer, which is too much for a pipe. folder: the fleet's own, which ends with the fleet."""
    with replacing(folder / f"{unit}.cards") as file:
        file.write(msgspec.msgpack.encode(cards))


def kept_cards(folder: Path, unit: str) -> list[ModelCard]:
    """Returns what the unit has served last; no card if it has never served."""
    with suppress(FileNotFoundError):
        return msgspec.msgpack.decode((folder / f"{unit}.cards").read_bytes(), type=list[ModelCard])
    return []
