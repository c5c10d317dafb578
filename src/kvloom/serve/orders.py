"""What the supervisor and a process it started say to each other, a line of JSON each.

The order goes down the child's stdin, which then stays open as long as the child is wanted. Reports come
up a pipe of their own. Neither is seen by other users of the machine, as arguments would be.
"""

from __future__ import annotations

from msgspec import Struct

from kvloom.core.spec import EngineSpec


class EngineOrder(Struct, frozen=True, kw_only=True):
    """socket: path where to serve the verbs. secret: what callers must know."""

    spec: EngineSpec
    socket: str
    secret: str


class GatewayOrder(Struct, frozen=True, kw_only=True):
    """listener: descriptor of the listening socket, inherited."""

    engine: str
    secret: str
    listener: int
    api_keys: frozenset[str]
    max_body: int


class Progress(Struct, frozen=True, tag="progress"):
    """What the process is doing now."""

    text: str


class Ready(Struct, frozen=True, tag="ready"):
    """It answers. chat: the models that have a chat template, where it knows."""

    chat: tuple[str, ...] = ()


class Refused(Struct, frozen=True, tag="refused"):
    """It ends, because what it was given cannot be used."""

    message: str


Order = EngineOrder | GatewayOrder
Report = Progress | Ready | Refused
