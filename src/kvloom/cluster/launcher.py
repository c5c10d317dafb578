"""Launchers start and end processes for a controller, and report what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from kvloom.cluster.state import ComponentStatus, FleetSpec, FleetStatus, NodeStatus, Phase, UnitSpec
from kvloom.types.errors import WireError
from kvloom.types.service import RestartStep
from kvloom.types.spec import EngineSpec


class Started(Struct, frozen=True, tag="started"):
    """The component has a process, which does not answer yet."""

    component: str
    pid: int | None = None
    node: str = ""


class Answered(Struct, frozen=True, tag="answered"):
    """The component's process answers for the first time."""

    component: str
    endpoint: str = ""
    routes: dict[str, str] = {}
    """The route under /v1 at which each of its models is asked."""


class Ended(Struct, frozen=True, tag="ended"):
    """The component's process has ended."""

    component: str
    how: str
    """How it ended, in words."""
    refused: bool = False
    """Whether it could not use its order."""
    node: str = ""
    """The node that it was on; empty on one host."""


class Missed(Struct, frozen=True, tag="missed"):
    """The component's process had given no sign of life at so many looks in a row."""

    component: str
    misses: int


class FoundProcess(Struct, frozen=True, tag="found"):
    """A process that was started for a controller before this one."""

    component: str
    generation: int
    phase: Phase
    pid: int | None = None
    node: str = ""
    endpoint: str = ""
    device: str = ""
    """The device that a unit was given, if it is another one than it specifies."""
    routes: dict[str, str] = {}
    """The route under /v1 at which each of its models is asked."""


class UnitSeen(Struct, frozen=True, tag="seen"):
    """A gateway has asked a unit's process what it serves."""

    component: str
    generation: int
    problem: str = ""
    """The reason why it gets no requests all the same; empty if it gets them."""


class Counted(Struct, frozen=True, tag="counted"):
    """A gateway counts its requests in flight at the units that get no new ones."""

    seq: int
    """The last change that the gateway had taken in."""
    calls: dict[str, int]


class NodeJoined(Struct, frozen=True, kw_only=True, tag="joined"):
    """A node has joined, or its keeper answers again. None of its processes whose lease was over
    serves again before the launcher has carried out what the controller orders at this report."""

    node: str
    address: str = ""
    cores: int = 0
    memory: int = 0
    """Bytes that units may take there."""
    gpus: int = 0
    processes: tuple[FoundProcess, ...] = ()
    """All processes that run there."""


class NodeSilent(Struct, frozen=True, tag="silent"):
    """A node's keeper does not answer. What runs there may serve for `lease` seconds from now, at most."""

    node: str
    lease: float
    problem: str = ""


class NodeLost(Struct, frozen=True, tag="lost"):
    """Nothing of a node serves any more: its lease is over, or it was seen to end."""

    node: str
    problem: str = ""


class NodeLeft(Struct, frozen=True, tag="left"):
    """A node has left by itself, and nothing runs there any more."""

    node: str


NodeReport = NodeJoined | NodeSilent | NodeLost | NodeLeft
Report = Started | Answered | Ended | Missed | UnitSeen


class Snapshot(Struct, frozen=True, kw_only=True, tag="snapshot"):
    """A whole fleet."""

    seq: int
    """The last change that it holds."""
    spec: FleetSpec
    status: FleetStatus


class Change(Struct, frozen=True, kw_only=True, tag="change", omit_defaults=True):
    """The differences from the change before it, or from the snapshot."""

    seq: int
    spec: FleetSpec | None = None
    """The specification without its units; None if all of that is as it was."""
    units: dict[str, UnitSpec | None] = {}
    """Units whose specification has changed; None for those that were removed."""
    processes: dict[str, ComponentStatus | None] = {}
    """Components whose status has changed; None for those that are forgotten."""
    nodes: dict[str, NodeStatus | None] = {}
    """Nodes whose status has changed; None for those that are forgotten."""
    rolls: bool = False
    """Whether another rolling restart has begun: earlier steps are no longer told."""
    steps: list[RestartStep] = []
    """The steps that the rolling restart has done since."""


class Edited(Struct, frozen=True, tag="edited", omit_defaults=True):
    """The answer to an edit."""

    number: int
    overrode: tuple[str, ...] = ()
    """Fields that somebody else had changed since the revision that the edit was made for."""
    refused: WireError | None = None
    """The error because of which nothing was changed; None if something was."""


News = Snapshot | Change | Edited


class Launcher(Protocol):
    """Starts and ends processes. Each call takes effect later, and `Report`s tell of it. A component has one
    process at a time: it is started only after its last one was reported to have ended, or the node of that
    to be lost. A launcher of one host has no nodes; one of several tells of them by `NodeReport`s, and passes
    over what it is told of a component on a node that does not answer. Nothing raises."""

    def start(self, component: str, generation: int, engine: EngineSpec | None, node: str = "") -> None:
        """Starts a process. engine: what a unit is to serve; None for a gateway and the fleet scheduler.
        node: the node on which it starts; empty for this host."""

    def stop(self, component: str) -> None:
        """Tells the component's process to end by itself."""

    def kill(self, component: str) -> None:
        """Ends the component's process at once."""

    def discard(self, node: str, component: str) -> None:
        """Ends at once a process that a node was found to have, because the component has another one. Of
        this process only its end is told, with its node."""

    def retire(self, component: str) -> None:
        """Tells a gateway to end with its last request."""

    def tell(self, component: str, news: News) -> None:
        """Tells a gateway what the fleet is to be and is. They come in the order in which they were told."""

    def forget(self, component: str) -> None:
        """Forgets a component that has no process."""

    def running(self) -> Sequence[FoundProcess]:
        """Returns the processes that there are, for a controller that starts anew."""
