"""Launchers start and end processes for a controller, and report what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from kvloom.cluster.state import ComponentStatus, FleetSpec, FleetStatus, Phase, UnitSpec
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
    chat: tuple[str, ...] = ()
    """Its models that have a chat template."""


class Ended(Struct, frozen=True, tag="ended"):
    """The component's process has ended."""

    component: str
    how: str
    """In words."""
    refused: bool = False
    """Whether it could not use what it was told."""


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


class UnitSeen(Struct, frozen=True, tag="seen"):
    """A gateway has asked a unit's process what it serves."""

    component: str
    generation: int
    problem: str = ""
    """Why it gets no requests all the same."""


class Counted(Struct, frozen=True, tag="counted"):
    """A gateway counts its requests in flight at the units that get no new ones."""

    seq: int
    """The last change that the gateway had taken in."""
    calls: dict[str, int]


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
    """What is not a unit's, without the units; None if all of it is as it was."""
    units: dict[str, UnitSpec | None] = {}
    """Units that are to be otherwise; None for those that are to be there no more."""
    processes: dict[str, ComponentStatus | None] = {}
    """Components of which something else is there; None for those of which nothing is kept."""
    rolls: bool = False
    """Whether another rolling restart has begun: earlier steps are no longer told."""
    steps: list[RestartStep] = []
    """What the rolling restart has done since."""


class Edited(Struct, frozen=True, tag="edited", omit_defaults=True):
    """The answer to an edit."""

    number: int
    overrode: tuple[str, ...] = ()
    """Fields that somebody else had changed since the revision that the edit was made for."""
    refused: WireError | None = None
    """Why nothing was changed."""


News = Snapshot | Change | Edited


class Launcher(Protocol):
    """Starts and ends processes. Each call takes effect later, and `Report`s tell of it. A component has one
    process at a time: it is started only after its last one was reported to have ended. Nothing raises."""

    def start(self, component: str, generation: int, engine: EngineSpec | None) -> None:
        """Starts a process. engine: what a unit is to serve; None for a gateway and the fleet scheduler."""

    def stop(self, component: str) -> None:
        """Tells the component's process to end by itself."""

    def kill(self, component: str) -> None:
        """Ends the component's process at once."""

    def retire(self, component: str) -> None:
        """Tells a gateway to end with its last request."""

    def tell(self, component: str, news: News) -> None:
        """Tells a gateway what the fleet is to be and is. They come in the order in which they were told."""

    def forget(self, component: str) -> None:
        """Keeps nothing of a component that has no process."""

    def running(self) -> Sequence[FoundProcess]:
        """Returns the processes that there are, for a controller that starts anew."""
