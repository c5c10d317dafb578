"""How many replicas each model gets: one mesh may be too small for all that comes to a popular model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Final

from kvloom.plan.board import Placement
from kvloom.plan.cluster import MeshKind, Nodes, mesh_kinds
from kvloom.plan.estimate import Estimator, Item
from kvloom.plan.search import Effort, Search

MOST: Final = 64
_ROUNDS: Final = 12
_TRIED: Final = 3  # models a round that get a replica more, to see
_BUDGET: Final = 0.35  # of all evaluations, for each of the first two
_BETTER: Final = 1e-3  # of all requests; a replica is not worth less

Counts = tuple[int, ...]


def best_placement(estimator: Estimator, cluster: Sequence[Nodes], effort: Effort) -> Placement:
    """Over placements and numbers of replicas: as few as large meshes need, or as many as the meshes that
    answer most a device need; then one more or less where that gains."""
    search = Search(estimator, cluster, effort)
    starts = list(dict.fromkeys(_starts(estimator, cluster, effort.replicas)))
    tried: dict[Counts, Placement] = {}
    for n, counts in enumerate(starts, 1):
        tried[counts] = search.best(_items(estimator, counts), _BUDGET * n)
    for _ in range(_ROUNDS):
        best = max(tried, key=lambda counts: tried[counts].rank)
        fresh = [
            counts for counts in _others(estimator, tried[best], best, effort.replicas) if counts not in tried
        ]
        for counts in fresh:
            if search.spent:
                break
            tried[counts] = search.best(_items(estimator, counts))
        if not any(_better(tried[c], tried[best], estimator) for c in fresh if c in tried):
            break
    return max(tried.values(), key=lambda placement: placement.rank)


def _items(estimator: Estimator, counts: Counts) -> list[Item]:
    return [estimator.item(demand, count) for demand, count in enumerate(counts) for _ in range(count)]


def _better(placement: Placement, than: Placement, estimator: Estimator) -> bool:
    if len(placement.left) != len(than.left):
        return len(placement.left) < len(than.left)
    whole = sum(demand.rate for demand in estimator.demands)
    return placement.score > than.score + _BETTER * whole


def _starts(estimator: Estimator, cluster: Sequence[Nodes], most: int) -> Iterator[Counts]:
    kinds = mesh_kinds(cluster)
    for per_device in (False, True):
        needs = [_need(estimator, kinds, demand, per_device) for demand in range(len(estimator.demands))]
        devices = sum(count * gpus for count, gpus in needs)
        there = sum(nodes.total for nodes in cluster)
        ease = min(1.0, there / devices) if devices else 1.0  # what cannot be met is not asked for
        yield tuple(max(1, min(most, int(count * ease))) for count, _ in needs)


def _need(estimator: Estimator, kinds: Sequence[MeshKind], demand: int, per_device: bool) -> tuple[int, int]:
    """Replicas that answer the demand if each has a mesh for itself, and devices of such a mesh."""
    rate, item = estimator.demands[demand].rate, estimator.item(demand, 1)
    options = []
    for kind in kinds:
        candidate = estimator.candidate(kind, item)
        if candidate is not None:
            answered = min(candidate.throughput, rate)
            options.append((answered / (kind.gpus if per_device else 1), -kind.gpus, candidate.throughput))
    if not options or not rate:
        return 1, 1
    _, gpus, throughput = max(options)
    return min(MOST, ceil(rate / throughput)), -gpus


def _others(estimator: Estimator, placement: Placement, counts: Counts, most: int) -> list[Counts]:
    """Without a replica of what has no room; else with one more of what is furthest behind."""
    if placement.left:
        over = {estimator.demand(item) for item in placement.left}
        fewer = tuple(max(1, n - 1) if demand in over else n for demand, n in enumerate(counts))
        return [fewer]
    missing: dict[int, float] = {}
    for kind, unit in zip(placement.kinds, placement.units, strict=True):
        estimate = estimator.known(kind, unit)
        for item, throughput in zip(estimate.items, estimate.throughput, strict=True):
            short = estimator.rate(item) - throughput
            if short > 0:
                demand = estimator.demand(item)
                missing[demand] = missing.get(demand, 0.0) + short
    worst = sorted(missing, key=lambda demand: -missing[demand])[:_TRIED]
    most = min(most, len(placement.kinds) * 2)
    return [
        tuple(n + (demand == other) for other, n in enumerate(counts))
        for demand in worst
        if counts[demand] < most
    ]
