"""Whether units take requests, as those who run a fleet see and order it."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from kvloom.types.load import UnitLoad
from kvloom.types.spec import EngineSpec

LONGEST_DRAIN: Final = 3600  # seconds
PATIENCE: Final = 120.0  # seconds for which a request waits for who is about to serve it, if nobody says

Service = Literal["up", "down", "draining", "drained", "restarting", "starting", "away"]
NO_PROCESS: Final[tuple[Service, ...]] = ("down", "restarting", "starting", "away")  # or none that answers
IN_SERVICE: Final[tuple[Service, ...]] = ("up", "down")  # others give away what they have


class UnitState(Struct, frozen=True, kw_only=True):
    """state: up, it takes requests; down, it does not answer; draining, it takes none and still works on
    some; drained, it works on none; restarting, it is about to be a new process; away, it has no process, and
    gets one where it is needed; starting, it is about to. calls: those that the router has in flight there.
    models: those it serves, or is to serve once it has a process. problem: why it is down."""

    name: str
    state: Service
    calls: int
    models: tuple[str, ...]
    problem: str = ""


class Drain(Struct, frozen=True, kw_only=True):
    """Body of drain and restart. seconds: how long what runs there is waited for, the config's `drain` where
    it is left out."""

    seconds: Annotated[float, Meta(ge=0, le=LONGEST_DRAIN)] | None = None


class Admit(Struct, frozen=True):
    """Body of admit, which has nothing to say."""


class RestartStep(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of a rolling restart: a component begins to restart, has done so in `seconds`, or has failed to, of
    `problem`, with which the whole ends."""

    component: str
    state: Literal["restarting", "restarted", "failed"]
    seconds: float | None = None
    problem: str = ""


class Scale(Struct, frozen=True):
    """least, most: replicas. low, high: mean freeness in decode steps, outside of which it must be for
    `seconds` before there is one more or one less. idle: seconds without a request before the last one goes,
    where least is 0. Raises ValueError where they are the wrong way round."""

    least: int
    most: int
    low: float = 160.0
    high: float = 960.0
    seconds: float = 10.0
    idle: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or not self.most:
            raise ValueError(f"{self.least} to {self.most} replicas; 0 ≤ least ≤ most and 1 ≤ most are right")
        if not self.low < self.high:
            raise ValueError(f"low {self.low:g} and high {self.high:g}; low < high is right")
        if not self.seconds >= 0 or not self.idle >= 0:
            raise ValueError(f"seconds {self.seconds:g} and idle {self.idle:g}; 0 or more is right")


class GroupSpec(Struct, frozen=True):
    """Units that are replicas of one another, in the order in which they are started."""

    units: tuple[str, ...]
    scale: Scale


class UnitGroup(Struct, frozen=True):
    """The same as it stands. starting: those that are about to have a process. away: those that can be given
    one now, in this order; those that were to lose theirs, and still have it, come first. models: what each
    serves. idle: seconds since the last request ended there."""

    units: frozenset[str]
    scale: Scale
    starting: int = 0
    away: tuple[str, ...] = ()
    models: frozenset[str] = frozenset()
    idle: float = 0.0


class Steps(Struct, frozen=True):
    """Units that are to have a process, and those that are to lose theirs once nothing runs there."""

    start: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


class Pair(Struct, frozen=True, order=True):
    """Two units: requests are to move from the one to the other."""

    source: str
    destination: str


class Pairs(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """These pairs stand for `seconds` from now, unless others are told, and none beside them. floor: freeness
    that a destination keeps, in decode steps: what would leave it with less does not move there."""

    pairs: tuple[Pair, ...]
    seconds: Annotated[float, Meta(gt=0)]
    floor: float = 0.0


class FleetState(Struct, frozen=True, kw_only=True):
    """loads: of the units that answer, by name; one that takes no requests drains. waiting: requests that
    nobody can answer yet, by model. groups: units that come and go."""

    loads: dict[str, UnitLoad]
    waiting: dict[str, int] = {}
    groups: dict[str, UnitGroup] = {}


class Placement(Struct, frozen=True, kw_only=True):
    """units: those that have a process. away: those that have none now. scaled: names of those that
    come and go by themselves. memory: bytes that were free before the fleet was started. cores: those that it
    may use."""

    units: tuple[EngineSpec, ...]
    away: tuple[EngineSpec, ...]
    scaled: tuple[str, ...]
    memory: int
    cores: int
