"""From which unit to which requests move: the least free with the freest (Llumnix, section 4.4)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from kvloom.cluster.freeness import Thresholds
from kvloom.types.load import ModelLoad, UnitLoad
from kvloom.types.service import Pair


def pair(
    loads: Mapping[str, UnitLoad],
    free: Mapping[str, float],
    standing: Iterable[Pair],
    thresholds: Thresholds,
) -> tuple[Pair, ...]:
    """The pairs of the next period, sorted. free: each unit's freeness; by it one that drains is a source, as
    long as something runs there, and one that has just started takes. standing: the pairs of this period;
    they stay until a side has recovered. A unit is in one pair at most, and has a model in common with its
    peer that runs or waits at the source. Takes O(n log n) for n models on all units together."""
    sources = {name for name in loads if free[name] < thresholds.out}
    targets = {name for name in loads if free[name] > thresholds.into}
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
    """Whether some are left."""
    while names and names[-1] not in targets:
        names.pop()
    return bool(names)
