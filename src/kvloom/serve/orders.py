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


class GatewayOrder(Struct, frozen=True, kw_only=True):
    """Be ready to serve, and wait for `Begin`. engines: unit → URL. listener: descriptor of the listening
    socket, inherited. folder: where the program is looked for, if it is one of the user's. sockets: where the
    engines' sockets are."""

    engines: dict[str, str]
    secret: str
    listener: int
    api_keys: frozenset[str]
    max_body: int
    program: ProgramSpec
    folder: str
    sockets: str


class Begin(Struct, frozen=True):
    """Serve from now on."""


class Progress(Struct, frozen=True, tag="progress"):
    """What the process is doing now."""

    text: str


class Ready(Struct, frozen=True, tag="ready"):
    """It answers. chat: the models that have a chat template, where it knows."""

    chat: tuple[str, ...] = ()


class Refused(Struct, frozen=True, tag="refused"):
    """It ends, because what it was given cannot be used."""

    message: str


Order = EngineOrder | GatewayOrder | Begin
Report = Progress | Ready | Refused
