"""Finds the steps by which a fleet that serves gets from one placement to another.

Units never change: one that is not as the plan wants it ends, and another takes its place. A step starts a
unit, or stops one, whose requests go on elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

GIB: Final = 1 << 30
MOST_STATES: Final = 20_000  # that the search looks at: ten units that end and ten that begin, and less


@dataclass(frozen=True, slots=True, order=True)
class Placed:
    """A unit: its models, the memory that it takes for its pool and all else, and whatever else tells it from
    others. Two units that are equal can stand for each other."""

    models: tuple[str, ...]
    bytes: int
    form: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class StartUnit:
    """A step that starts a unit."""

    unit: int
    """The unit's number in the plan."""


@dataclass(frozen=True, slots=True)
class StopUnit:
    """A step that stops a unit."""

    unit: str
    waits: tuple[str, ...] = ()
    """The models that no unit has from here on, until one that has them is started."""


Step = StartUnit | StopUnit


@dataclass(frozen=True, slots=True)
class Repair:
    """The steps to a plan."""

    kept: Mapping[str, int]
    """The units that are as the plan wants them, and their numbers there."""
    steps: tuple[Step, ...]


class Unreachable(Exception):
    """No order of steps leads to the plan. The message is one line."""


def repair(now: Mapping[str, Placed], plan: Iterable[Placed], memory: int) -> Repair:
    """Returns the steps from the units `now`, by name, to those of the plan. `memory` is the bytes that all
    units may take together, at every step, of which the units that there are have theirs.

    Each model that has a unit keeps one all the while, if there is such an order of steps: if there is none,
    the fewest models possible at a time wait. Raises Unreachable if the plan itself does not fit, or leaves
    out a model that is served.
    """
    wanted = tuple(plan)
    served = {model for unit in now.values() for model in unit.models}
    left_out = served - {model for unit in wanted for model in unit.models}
    if left_out:
        raise Unreachable(f"the plan has no unit for {', '.join(sorted(left_out))}, which is served")
    total = sum(unit.bytes for unit in wanted)
    if total > memory:
        sizes = f"{total / GIB:.1f} and {memory / GIB:.1f} GiB"
        raise Unreachable(f"the plan's units take {total:,} bytes, and there are {memory:,} ({sizes})")
    kept = _kept(now, wanted)
    taken = set(kept.values())
    change = _Change(
        old={name: unit for name, unit in now.items() if name not in kept},
        new={number: unit for number, unit in enumerate(wanted) if number not in taken},
        stays=Counter(model for name in kept for model in now[name].models),
        room=memory - sum(now[name].bytes for name in kept),
        served=frozenset(served),
    )
    steps = change.without_gap()
    return Repair(kept, change.with_gaps() if steps is None else steps)


def _kept(now: Mapping[str, Placed], wanted: tuple[Placed, ...]) -> dict[str, int]:
    open_ = dict(enumerate(wanted))
    kept: dict[str, int] = {}
    for name, unit in now.items():
        number = next((number for number, other in open_.items() if other == unit), None)
        if number is not None:
            kept[name] = number
            del open_[number]
    return kept


State = tuple[frozenset[str], frozenset[int]]
"""The old units that are still there, and the new ones that are there already."""


@dataclass(frozen=True, slots=True)
class _Change:
    """The units that are to end and to begin, and the search for an order."""

    old: Mapping[str, Placed]
    new: Mapping[int, Placed]
    stays: Counter[str]
    """The number of units that keep each model, whatever happens to the others."""
    room: int
    """The bytes for all other units."""
    served: frozenset[str]

    def without_gap(self) -> tuple[Step, ...] | None:
        """Searches depth first, and takes what frees memory first. Returns None if there is no such order, or
        none was found among the first states."""
        begin: State = (frozenset(self.old), frozenset())
        came: dict[State, tuple[State, Step] | None] = {begin: None}
        open_ = [begin]
        while open_ and len(came) <= MOST_STATES:
            state = open_.pop()
            if not state[0] and len(state[1]) == len(self.new):
                return self._way(state, came)
            for step in self._safe(state):
                after = _after(state, step)
                if after not in came:
                    came[after] = (state, step)
                    open_.append(after)
        return None

    def with_gaps(self) -> tuple[Step, ...]:
        """Takes safe steps as long as there are any; then the stop that leaves the fewest models without a
        unit."""
        state: State = (frozenset(self.old), frozenset())
        steps: list[Step] = []
        while state[0] or len(state[1]) < len(self.new):
            safe = self._safe(state)
            step = safe[-1] if safe else self._least_gap(state)
            steps.append(step)
            state = _after(state, step)
        return tuple(steps)

    def _way(self, state: State, came: Mapping[State, tuple[State, Step] | None]) -> tuple[Step, ...]:
        steps: list[Step] = []
        while (before := came[state]) is not None:
            state, step = before
            steps.append(step)
        return tuple(reversed(steps))

    def _safe(self, state: State) -> list[Step]:
        """Returns the steps that leave no model without a unit, the best last: stops, the largest of them
        last, come after starts, and of these the last serves most models which wait."""
        old, new = state
        free = self.room - self._taken(state)
        missing = self.served - set(self._covers(state))
        starts = [number for number in self.new.keys() - new if self.new[number].bytes <= free]
        starts.sort(key=lambda number: (len(missing.intersection(self.new[number].models)), -number))
        stops = [name for name in old if not self._waits(state, name)]
        stops.sort(key=lambda name: (self.old[name].bytes, name))
        return [*map(StartUnit, starts), *map(StopUnit, stops)]

    def _least_gap(self, state: State) -> StopUnit:
        gaps = {name: self._waits(state, name) for name in state[0]}
        name = min(gaps, key=lambda name: (len(gaps[name]), -self.old[name].bytes, name))
        return StopUnit(name, gaps[name])

    def _waits(self, state: State, name: str) -> tuple[str, ...]:
        """Returns the models that only this old unit has."""
        covers = self._covers(state)
        return tuple(model for model in self.old[name].models if covers[model] == 1)

    def _covers(self, state: State) -> Counter[str]:
        """Returns the number of units of each model, without models that have none."""
        old = (model for name in state[0] for model in self.old[name].models)
        new = (model for number in state[1] for model in self.new[number].models)
        return self.stays + Counter(old) + Counter(new)

    def _taken(self, state: State) -> int:
        old = sum(self.old[name].bytes for name in state[0])
        return old + sum(self.new[number].bytes for number in state[1])


def _after(state: State, step: Step) -> State:
    old, new = state
    return (old - {step.unit}, new) if isinstance(step, StopUnit) else (old, new | {step.unit})
