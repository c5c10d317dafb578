"""What the supervisor and a process it started say to each other, a line of JSON each.

Orders go down the child's stdin, which then stays open as long as the supervisor lives. Reports come up a
pipe of their own. Neither is seen by other users of the machine, as arguments would be.
"""

from __future__ import annotations

from msgspec import Struct

from kvloom.core.spec import EngineSpec, ProgramSpec


class EngineOrder(Struct, frozen=True, kw_only=True):
    """socket: path where to serve the verbs. secret: what callers must know."""

    spec: EngineSpec
    socket: str
    secret: str


class Standing(Struct, frozen=True, kw_only=True, tag="standing"):
    """What a gateway was told while it served, kept for its successor. program: None for the config's.
    drained: units that are to get no requests."""

    program: ProgramSpec | None = None
    drained: frozenset[str] = frozenset()


class GatewayOrder(Struct, frozen=True, kw_only=True):
    """Be ready to serve, and wait for `Begin`; then units that were to restart are told of. engines: unit →
    URL. listener: descriptor of the listening socket, inherited. drain: seconds for which requests at a unit
    that is to restart are waited for. patience: those for which a request waits for a restart. program: the
    config's. folder: where a program is looked for, if it is one of the user's. sockets: where the engines'
    sockets are."""

    engines: dict[str, str]
    secret: str
    listener: int
    api_keys: frozenset[str]
    max_body: int
    program: ProgramSpec
    folder: str
    sockets: str
    admin_keys: frozenset[str] = frozenset()
    drain: float = 60.0
    patience: float = 120.0
    standing: Standing = Standing()


class Begin(Struct, frozen=True):
    """Serve from now on."""


class Restarted(Struct, frozen=True):
    """The unit's new process answers, or has died, of `problem`, and is tried again."""

    unit: str
    problem: str | None = None


class Progress(Struct, frozen=True, tag="progress"):
    """What the process is doing now."""

    text: str


class Ready(Struct, frozen=True, tag="ready"):
    """It answers. chat: the models that have a chat template, where it knows."""

    chat: tuple[str, ...] = ()


class Refused(Struct, frozen=True, tag="refused"):
    """It ends, because what it was given cannot be used."""

    message: str


class Restart(Struct, frozen=True, tag="restart"):
    """A new process is wanted in place of the unit's; `Restarted` tells how it went."""

    unit: str


Order = EngineOrder | GatewayOrder | Begin | Restarted
Report = Progress | Ready | Refused | Standing | Restart
