"""A controller's process listens at a Unix socket for those who attach to it: Ray's actor, which tells of
nodes, and `kvloom serve`, which shows the fleet and may end it."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from msgspec import Struct

from kvloom.serve.nodes.wire import Wire
from kvloom.serve.screen import FleetReady, Screen
from kvloom.types.errors import Unavailable


class AttachActor(Struct, frozen=True, tag="actor"):
    """An actor's first words."""


class NodeFound(Struct, frozen=True, tag="found"):
    """Ray has a node, whose keeper is at an address."""

    name: str
    address: str


class NodeGone(Struct, frozen=True, tag="gone"):
    """Tells that Ray has a node no more."""

    name: str


class NodeProblem(Struct, frozen=True, tag="problem"):
    """Tells that a node of Ray's has no keeper."""

    name: str
    problem: str


class Looked(Struct, frozen=True, tag="looked"):
    """Tells that all nodes that Ray has were told."""


class SignOfLife(Struct, frozen=True, tag="alive"):
    """Asks the controller for a sign of life, and is the controller's answer."""

    lease: float = 0.0
    """In the answer, the seconds for which a node's lease holds."""


class AttachView(Struct, frozen=True, tag="view"):
    """The first words of a process that shows the fleet."""


class EndFleet(Struct, frozen=True, tag="end"):
    """Ends the fleet. why: the reason, for people."""

    why: str


class ResourceBundle(Struct, frozen=True):
    """A unit's part of a node."""

    node: str
    cpus: int
    gpus: int


class ResourceBundles(Struct, frozen=True, tag="reserved"):
    """Tells the actor what each unit takes that has a process."""

    units: dict[str, ResourceBundle]


class KeeperMissed(Struct, frozen=True, tag="missed"):
    """Tells the actor that a node's keeper does not answer, so that it looks whether there is one."""

    name: str


class SpecCopy(Struct, frozen=True, tag="spec"):
    """Tells the actor what is kept of the fleet in the controller's file."""

    content: bytes


class Step(Struct, frozen=True, tag="step"):
    """Tells views what `Screen.step` shows, and so do those below."""

    text: str
    of: str


class Done(Struct, frozen=True, tag="done"):
    of: str


class Line(Struct, frozen=True, tag="line"):
    component: str
    line: str
    level: str = ""


class Over(Struct, frozen=True, tag="over"):
    """The fleet has ended. code: the exit code of `kvloom serve`."""

    code: int
    why: str


FromActor = AttachActor | NodeFound | NodeGone | NodeProblem | Looked | SignOfLife
FromView = AttachView | EndFleet
ToActor = KeeperMissed | ResourceBundles | SpecCopy | SignOfLife | Over
ToView = Step | Done | Line | FleetReady | Over


class Joins(Protocol):
    """Hears which nodes a cluster has."""

    def join(self, name: str, address: str) -> None:
        """Hears that a node has come. address: that of its keeper."""

    def leave(self, name: str) -> None: ...

    def warn(self, name: str, problem: str) -> None:
        """Hears that a node cannot be used."""


def show(screen: Screen, shown: ToView) -> None:
    """Shows on a view's screen what the fleet's shows."""
    match shown:
        case Step(text, of):
            screen.step(text, of)
        case Done(of):
            screen.done(of)
        case Line(component, line, level):
            screen.log(component, line, level)
        case FleetReady():
            screen.ready(shown)
        case Over():
            screen.end_steps()


async def attach(address: str, kind: object) -> Wire[Any]:
    """Returns a connection to the controller's process whose socket is at `address`. kind: what is to be
    read. Raises Unavailable if nobody listens there."""
    try:
        reader, writer = await asyncio.open_unix_connection(address)
    except OSError as error:
        raise Unavailable(f"the fleet's controller cannot be reached: {error.strerror}") from error
    return Wire(reader, writer, kind)
