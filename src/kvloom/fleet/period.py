"""What the fleet scheduler decides once a period, from the last reports of all units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvloom.core.load import UnitLoad
from kvloom.core.rescheduling import Pair
from kvloom.fleet.freeness import freeness
from kvloom.fleet.pairing import pair
from kvloom.fleet.scaling import Outside, Scale, Step, rescale
from kvloom.fleet.thresholds import Thresholds


@dataclass(frozen=True, slots=True)
class Group:
    """Units that are replicas of one another, and how many of them there may be."""

    units: frozenset[str]
    scale: Scale
    starting: int = 0


@dataclass(frozen=True, slots=True)
class Period:
    """What was decided. Nothing else is kept from period to period: a scheduler that starts anew begins with
    `Period()`. steps: by group, where its number of replicas changes."""

    pairs: tuple[Pair, ...] = ()
    outside: Mapping[str, Outside] = field(default_factory=dict)
    steps: Mapping[str, Step] = field(default_factory=dict)


def decide(
    loads: Mapping[str, UnitLoad],
    last: Period,
    now: float,
    thresholds: Thresholds,
    groups: Mapping[str, Group] | None = None,
) -> Period:
    """loads: of the units that have reported; the others take no part. now: in seconds."""
    free = {name: freeness(load) for name, load in loads.items()}
    outside: dict[str, Outside] = {}
    steps: dict[str, Step] = {}
    for name, group in (groups or {}).items():
        own = {unit: loads[unit] for unit in group.units if unit in loads}
        watched, step = rescale(own, group.starting, last.outside.get(name), now, group.scale)
        if watched:
            outside[name] = watched
        if step:
            steps[name] = step
    return Period(pair(loads, free, last.pairs, thresholds), outside, steps)
