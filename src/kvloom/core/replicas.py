"""How many replicas a unit has, and what a fleet scheduler must see to decide on it."""

from __future__ import annotations

from msgspec import Struct


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


class Group(Struct, frozen=True):
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
