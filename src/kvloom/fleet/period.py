"""What the fleet scheduler decides once a period, from the last reports of all units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvloom.core.load import UnitLoad
from kvloom.core.replicas import Group, Steps
from kvloom.core.rescheduling import Pair
from kvloom.fleet.freeness import freeness
from kvloom.fleet.pairing import pair
from kvloom.fleet.scaling import Drain, Outside, Start, Step, Usage, rescale
from kvloom.fleet.thresholds import Thresholds
from kvloom.fleet.usage import virtual_usage


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
    waiting: Mapping[str, int] | None = None,
    usage: Usage = virtual_usage,
) -> Period:
    """loads: of the units that have reported; the others take no part. now: in seconds. waiting: requests
    that nobody can answer yet, by model; of several groups that serve it the first that can has to. usage: by
    which the number of replicas follows."""
    free = {name: freeness(load) for name, load in loads.items()}
    outside: dict[str, Outside] = {}
    steps: dict[str, Step] = {}
    wanted = {model for model, count in (waiting or {}).items() if count}
    for name, group in (groups or {}).items():
        own = {unit: loads[unit] for unit in group.units if unit in loads}
        waits = not wanted.isdisjoint(group.models)
        watched, step = rescale(
            own,
            group.starting,
            last.outside.get(name),
            now,
            group.scale,
            waits=waits,
            idle=group.idle,
            usage=usage,
        )
        if watched:
            outside[name] = watched
        if step:
            steps[name] = step
        if group.starting or (isinstance(step, Start) and group.away):
            wanted -= group.models
    return Period(pair(loads, free, last.pairs, thresholds), outside, steps)


def carried_out(steps: Mapping[str, Step], groups: Mapping[str, Group]) -> Steps:
    """Which units that means. Those that cannot be started now are not: the next period asks anew."""
    return Steps(
        start=tuple(
            unit
            for name, step in steps.items()
            if isinstance(step, Start)
            for unit in groups[name].away[: step.count]
        ),
        stop=tuple(step.unit for step in steps.values() if isinstance(step, Drain)),
    )
