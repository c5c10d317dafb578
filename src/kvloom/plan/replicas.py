"""Finds how many replicas each model gets: one mesh may be too small for all requests to a popular model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Final

from kvloom.plan.board import BoardPlacement
from kvloom.plan.cluster import MeshKind, Nodes, mesh_kinds
from kvloom.plan.estimate import Estimator, Item
from kvloom.plan.search import Search, SearchEffort

MOST: Final = 64
_ROUNDS: Final = 32
_TRIED: Final = 3  # models a round that get a replica more, to see
_BUDGET: Final = 0.35  # of all evaluations, for each of the first two
_CHEAP: Final = 0.5  # of all evaluations; where no more were needed, more is tried
_ALIKE: Final = 3  # replicas of each model, tried where that is cheap
_AROUND: Final = 3  # numbers of replicas that others are tried around, likewise
_GROUPS: Final = 24  # groups of meshes that other numbers of replicas are tried on: the best so far
_BETTER: Final = 1e-3  # of all requests; a replica is not worth less

Counts = tuple[int, ...]


def best_placement(estimator: Estimator, cluster: Sequence[Nodes], effort: SearchEffort) -> BoardPlacement:
    """Returns the best placement over numbers of replicas: as few as large meshes need, or as many as the
    meshes that answer most a device need, or the same number for all; then one more or less if that gains."""
    climb = _Climb(estimator, Search(estimator, cluster, effort), effort)
    for n, counts in enumerate(dict.fromkeys(_starts(estimator, cluster, effort.replicas)), 1):
        climb.start(counts, _BUDGET * n)
    climb.go(1)
    if estimator.spent < _CHEAP * effort.evaluations:
        for each in range(1, min(_ALIKE, effort.replicas) + 1):
            climb.start((each,) * len(estimator.demands), 1.0)
        climb.go(_AROUND)
    return climb.best


class _Climb:
    """Climbs from the numbers of replicas that answer most to others near them."""

    def __init__(self, estimator: Estimator, search: Search, effort: SearchEffort) -> None:
        self._estimator = estimator
        self._search = search
        self._effort = effort
        self._tried: dict[Counts, BoardPlacement] = {}

    @property
    def best(self) -> BoardPlacement:
        return max(self._tried.values(), key=lambda placement: placement.rank)

    def start(self, counts: Counts, budget: float) -> None:
        """Tries all groups of meshes, within a part of all evaluations."""
        if counts not in self._tried:
            self._tried[counts] = self._search.best(_items(self._estimator, counts), budget=budget)

    def go(self, around: int) -> None:
        """Tries numbers near the best, on the best groups of meshes, while that gains."""
        for _ in range(_ROUNDS):
            ranked = sorted(self._tried, key=lambda counts: self._tried[counts].rank, reverse=True)[:around]
            if not self._near(ranked[0]):
                return  # nothing is missing
            last = self._tried[ranked[-1]]
            fresh = [counts for near in map(self._near, ranked) for counts in near if self._try(counts)]
            if not any(_better(self._tried[counts], last, self._estimator) for counts in fresh):
                return

    def _near(self, counts: Counts) -> list[Counts]:
        return _others(self._estimator, self._tried[counts], counts, self._effort.replicas)

    def _try(self, counts: Counts) -> bool:
        if counts in self._tried or self._search.exhausted:
            return False
        self._tried[counts] = self._search.best(_items(self._estimator, counts), most=_GROUPS)
        return True


def _items(estimator: Estimator, counts: Counts) -> list[Item]:
    return [estimator.item(demand, count) for demand, count in enumerate(counts) for _ in range(count)]


def _better(placement: BoardPlacement, than: BoardPlacement, estimator: Estimator) -> bool:
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


def _others(estimator: Estimator, placement: BoardPlacement, counts: Counts, most: int) -> list[Counts]:
    """Yields numbers nearby: without a replica of what has no room; else with one more of what is furthest
    behind, or one less of what is least so, of each or of all of them."""
    if placement.left:
        over = {estimator.demand(item) for item in placement.left}
        return [tuple(max(1, n - 1) if demand in over else n for demand, n in enumerate(counts))]
    missing: dict[int, float] = {}
    for kind, unit in zip(placement.kinds, placement.units, strict=True):
        estimate = estimator.known(kind, unit)
        for item, throughput in zip(estimate.items, estimate.throughput, strict=True):
            short = estimator.rate(item) - throughput
            if short > 0:
                demand = estimator.demand(item)
                missing[demand] = missing.get(demand, 0.0) + short
    if not missing:
        return []
    demands = estimator.demands
    ranked = sorted(range(len(counts)), key=lambda n: (-missing.get(n, 0.0), -demands[n].compute))
    most = min(most, len(placement.kinds) * 2)
    more = [demand for demand in ranked if counts[demand] < most][:_TRIED]
    fewer = [demand for demand in reversed(ranked) if counts[demand] > 1][:_TRIED]
    steps = [({demand}, 1) for demand in more] + [({demand}, -1) for demand in fewer]
    steps += [(set(more), 1), ({demand for demand in fewer if demand != ranked[0]}, -1)]
    return [
        tuple(n + step * (demand in some) for demand, n in enumerate(counts)) for some, step in steps if some
    ]
