"""Chooses the unit for each new request, and the pairs of units between which requests move (Llumnix, section
4.4)."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

from kvloom.engine.freeness import Arrival, Thresholds, wanted
from kvloom.types.load import ModelLoad, UnitLoad
from kvloom.types.service import Pair

_NO_ROOM: Final = sys.maxsize  # more headroom than any has: after all that hold the request

Unit = TypeVar("Unit")
Dispatch = Callable[[Mapping[Unit, UnitLoad], Mapping[Unit, int], Arrival], Unit | None]


def freest(loads: Mapping[Unit, UnitLoad], turns: Mapping[Unit, int], arrival: Arrival) -> Unit | None:
    """Returns the unit that a new request goes to.

    Among the units that hold the request, those on which its level adds the least headroom come first, and of
    these the one with the most freeness once the request runs there. Llumnix (section 4.4) looks at freeness
    alone, and before. On a unit that runs others of the level their headroom is there already, so they gather
    until one finds no room beside their load. A request without a level adds no headroom anywhere. If no unit
    holds the request, it waits behind all that wait there, of which freeness counts the first alone; so the
    unit is chosen that lacks the least for all of them.
    """

    def cost(load: UnitLoad) -> tuple[int, float]:
        left = arrival.freeness(load)
        return (arrival.headroom(load), -left) if left >= 0 else (_NO_ROOM, arrival.lacks(load))

    return _least(loads, turns, cost)


def infaas(loads: Mapping[Unit, UnitLoad], turns: Mapping[Unit, int], arrival: Arrival) -> Unit | None:
    """Returns the unit with the least of its memory in use, if all that waits counts as if it ran: INFaaS++
    (Llumnix, section 6.1)."""
    return _least(loads, turns, lambda load: (0, wanted(load) / load.total_blocks))


def _least(
    loads: Mapping[Unit, UnitLoad], turns: Mapping[Unit, int], cost: Callable[[UnitLoad], tuple[int, float]]
) -> Unit | None:
    open_ = [(cost(load), turns[unit], unit) for unit, load in loads.items() if not load.draining]
    return min(open_, key=lambda one: one[:2])[2] if open_ else None


def pair(
    loads: Mapping[str, UnitLoad],
    free: Mapping[str, float],
    standing: Iterable[Pair],
    thresholds: Thresholds,
) -> tuple[Pair, ...]:
    """Returns the pairs of the next period, sorted. free: each unit's freeness, by which a draining unit is a
    source as long as something runs there, and one that has just started is a destination; standing: the
    pairs of this period, which stay until one side has recovered.

    Both units of a pair send and receive K and V. A unit is in one pair at most, and shares with its peer a
    model that runs or waits at the source. The time is O(n log n) for n models on all units together.
    """
    movers = [name for name, load in loads.items() if load.moves]
    sources = {name for name in movers if free[name] < thresholds.out}
    targets = {name for name in movers if free[name] > thresholds.into}
    pairs = [one for one in standing if _stays(one, loads, sources, targets)]
    for one in pairs:
        sources.discard(one.source)
        targets.discard(one.destination)
    takers: dict[str, list[str]] = defaultdict(list)  # by model, the freest last
    for name in sorted(targets, key=lambda name: (free[name], name)):
        for model in loads[name].models:
            takers[model].append(name)
    for source in sorted(sources, key=lambda name: (free[name], name)):
        lists = [takers[model] for model, load in loads[source].models.items() if _gives(load)]
        found = [names[-1] for names in lists if _drop_taken(names, targets)]
        if found:
            best = max(found, key=lambda name: (free[name], name))
            targets.discard(best)
            pairs.append(Pair(source, best))
    return tuple(sorted(pairs))


def _stays(one: Pair, loads: Mapping[str, UnitLoad], sources: set[str], targets: set[str]) -> bool:
    return (
        one.source in sources
        and one.destination in targets
        and any(
            _gives(load) and model in loads[one.destination].models
            for model, load in loads[one.source].models.items()
        )
    )


def _gives(load: ModelLoad) -> bool:
    return load.running > 0 or load.waiting > 0


def _drop_taken(names: list[str], targets: set[str]) -> bool:
    """Drops the names that are targets no more, and returns whether some are left."""
    while names and names[-1] not in targets:
        names.pop()
    return bool(names)
