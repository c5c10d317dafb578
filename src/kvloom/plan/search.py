"""Searches the best placement: over numbers of replicas, because one mesh may be too small for all requests
to a popular model; and over all groups of meshes, or over as many as there is time for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import ceil
from typing import Final

from kvloom.plan.board import Board, BoardPlacement, improve
from kvloom.plan.cluster import Cut, Group, MeshKind, Nodes, fits, groups, mesh_kinds, meshes, worthwhile
from kvloom.plan.estimate import Estimator, Item
from kvloom.plan.growth import AMPLE

_TIE: Final = 0.01  # of the item's rate: gains that differ by less are alike

Order = Callable[[Item], float]


def place(
    estimator: Estimator,
    kinds: Sequence[MeshKind],
    items: Sequence[Item],
    order: Order,
    *,
    small: bool,
    width: int,
) -> BoardPlacement:
    """Runs algorithm 1 on one group of meshes: items by `order`, the largest first, each to the mesh on which
    it gains most. If `small` is set, it takes the smallest of meshes that gain alike, else the one with the
    best score; `width` is that of the `Board`."""
    board = Board(estimator, kinds, width)
    left = []
    for item in sorted(items, key=lambda item: (-order(item), item)):
        options = []
        for at in board.open(item):
            gain = board.gain(((at, board.units[at] | {item}),))
            if gain is not None:
                options.append((gain, at))
        if not options:
            left.append(item)
            continue
        least = max(options)[0] - (_TIE * estimator.rate(item) if small else 0.0)
        alike = [(kinds[at].bytes if small else 0, -gain, at) for gain, at in options if gain >= least]
        chosen = min(alike)[2]
        board.do(((chosen, board.units[chosen] | {item}),))
    return board.placement(left)


_STEPS: Final = (0.5, 0.25, 0.125, 0.0625, 0.0)  # of the meshes of a size that are cut anew at a time
_STARTS: Final = 32
_UNKNOWN: Final = (-(1 << 30), 0.0)
_EVALUATIONS: Final = 800  # for each device and model
_LEAST: Final = 1e-4  # of the score, that a step of the climb gains


@dataclass(frozen=True, slots=True)
class SearchEffort:
    """Limits of the search."""

    groups: int = 512
    """The number of groups up to which each is tried; if there are more, the search climbs."""
    width: int = 6
    """The number of occupied meshes of a kind that are looked at for a model."""
    refined: int = 16
    """The number of groups on whose best placement moves are tried."""
    evaluations: int = 100_000
    """The number of estimates of units after which nothing new is begun."""
    replicas: int = 64
    """The most replicas of a model; MuxServe has but one."""

    @staticmethod
    def fit(cluster: Sequence[Nodes], models: int) -> SearchEffort:
        """Returns a smaller effort for less: 32 devices and 19 models take a few seconds."""
        size = models + sum(nodes.total for nodes in cluster)
        return SearchEffort(evaluations=min(SearchEffort().evaluations, _EVALUATIONS * size))


class Search:
    """Finds placements of items on a cluster. It is deterministic, because it counts evaluations, not
    seconds."""

    def __init__(self, estimator: Estimator, cluster: Sequence[Nodes], effort: SearchEffort) -> None:
        self._estimator = estimator
        self._cluster = tuple(cluster)
        self._effort = effort
        self._kinds = mesh_kinds(cluster)
        self._budget = effort.evaluations
        self._ranks: dict[Group, tuple[int, float]] = {}

    @property
    def exhausted(self) -> bool:
        """Returns whether all evaluations were made."""
        return self._estimator.spent >= self._effort.evaluations

    @property
    def _spent(self) -> bool:
        return self._estimator.spent >= self._budget

    def best(self, items: Sequence[Item], *, budget: float = 1.0, most: int | None = None) -> BoardPlacement:
        """Returns the best placement found; some items may be left, if there is no room. `budget` is the part
        of all evaluations after which nothing new is begun. `most` is the number of groups to try, of those
        that were best with other items; if it is left out, all are tried."""
        estimator, effort = self._estimator, self._effort
        self._budget = int(budget * effort.evaluations)
        able = {
            item: [kind for kind in self._kinds if estimator.candidate(kind, item) is not None]
            for item in set(items)
        }
        useful = {kind for kinds in able.values() for kind in kinds}
        needed = max((min(kind.gpus for kind in kinds) for kinds in able.values() if kinds), default=0)
        idle = sum(nodes.count for nodes in self._cluster)  # one each, that the others' sizes leave over
        found = groups(self._cluster, useful, effort.groups)
        if found is None:
            placements = self._climb(items)
        else:
            found = worthwhile(found, len(items) + idle, needed)
            if most is not None:
                found.sort(key=lambda group: self._ranks.get(group, _UNKNOWN), reverse=True)
            placements = self._try(found[:most], items)
        placements.sort(key=lambda placement: placement.rank, reverse=True)
        best = placements[0]
        of_groups = {placement.kinds: placement for placement in reversed(placements)}
        for placement in sorted(of_groups.values(), key=lambda one: one.rank, reverse=True)[: effort.refined]:
            if self._ample(best, items):
                break
            better = improve(estimator, placement, width=effort.width, budget=self._budget)
            best = max(best, better, key=lambda placement: placement.rank)
        return best

    def _ample(self, placement: BoardPlacement, items: Sequence[Item]) -> bool:
        """Returns whether nothing could be better."""
        return not placement.left and all(
            self._estimator.known(kind, unit).level >= AMPLE
            for kind, unit in zip(placement.kinds, placement.units, strict=True)
        )

    def _try(self, found: Sequence[Group], items: Sequence[Item]) -> list[BoardPlacement]:
        placements: list[BoardPlacement] = []
        for group in found:
            if placements and self._spent:
                break
            here = self._place(group, items)
            rank = max(placement.rank for placement in here)
            self._ranks[group] = max(rank, self._ranks.get(group, _UNKNOWN))
            placements += here
        return placements

    def _place(self, group: Group, items: Sequence[Item]) -> list[BoardPlacement]:
        """Runs algorithm 1 by compute and by size, to the smaller of like meshes and to the better one."""
        kinds = meshes(self._cluster, group)
        return [
            place(self._estimator, kinds, items, order, small=small, width=self._effort.width)
            for order in (self._compute, self._bytes)
            for small in (True, False)
        ]

    def _compute(self, item: Item) -> float:
        return self._estimator.rate(item) * self._estimator.demands[self._estimator.demand(item)].flops

    def _bytes(self, item: Item) -> float:
        return float(self._estimator.demands[self._estimator.demand(item)].shape.weight_bytes)

    # -- if there are too many groups -------------------------------------------------------------------

    def _climb(self, items: Sequence[Item]) -> list[BoardPlacement]:
        """Climbs from groups of equal meshes: a part of one size is cut anew as another while that gains,
        first large parts, then smaller ones."""
        known: dict[Group, BoardPlacement] = {}

        def rank(group: Group) -> tuple[int, float]:
            if group not in known:
                if known and self._spent:
                    return -len(items) - 1, 0.0
                kinds = meshes(self._cluster, group)
                width = self._effort.width
                known[group] = place(self._estimator, kinds, items, self._compute, small=True, width=width)
            return known[group].rank

        here = max(self._starts(), key=rank)
        for step in _STEPS:
            while not (self._spent or self._ample(known[here], items)):
                next_ = max(self._neighbours(here, step), key=rank, default=here)
                if not _better(rank(next_), rank(here)):
                    break
                here = next_
        top = sorted(known.values(), key=lambda placement: placement.rank, reverse=True)
        return [*self._place(here, items), *top[: self._effort.refined]]

    def _starts(self) -> list[Group]:
        """Yields each kind of nodes cut into equal meshes, in all combinations, as far as they are not too
        many."""
        equal = [
            [((size, nodes.count * (nodes.gpus // size)),) for size in nodes.sizes] for nodes in self._cluster
        ]
        return list(islice(product(*equal), _STARTS))

    def _neighbours(self, group: Group, step: float) -> Iterator[Group]:
        for at, (nodes, cut) in enumerate(zip(self._cluster, group, strict=True)):
            for other in _recut(nodes, dict(cut), step):
                yield (*group[:at], other, *group[at + 1 :])


def _better(rank: tuple[int, float], than: tuple[int, float]) -> bool:
    return rank[0] > than[0] or (rank[0] == than[0] and rank[1] > than[1] * (1.0 + _LEAST))


def _recut(nodes: Nodes, cut: dict[int, int], step: float) -> Iterator[Cut]:
    """Yields the cuts in which a part of the meshes of one size have become ones of another."""
    for size, number in cut.items():
        for other in nodes.sizes:
            if other == size:
                continue
            freed = max(number * step, other / size, 1.0) * size
            made = int(freed // other)
            gone = -(-made * other // size)
            if gone > number or made == 0:
                continue
            new = {**cut, size: number - gone, other: cut.get(other, 0) + made}
            parts = tuple((n, new[n]) for n in nodes.sizes if new.get(n))
            if fits(nodes, parts):
                yield parts


MOST: Final = 64
_ROUNDS: Final = 32
_TRIED: Final = 3  # models a round that get a replica more, to see
_BUDGET: Final = 0.35  # of all evaluations, for each of the first two
_CHEAP: Final = 0.5  # of all evaluations; if no more were needed, more is tried
_ALIKE: Final = 3  # replicas of each model, tried if that is cheap
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
            if not any(_answers_more(self._tried[counts], last, self._estimator) for counts in fresh):
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


def _answers_more(placement: BoardPlacement, than: BoardPlacement, estimator: Estimator) -> bool:
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
    """Returns the number of replicas that answer the demand if each has a mesh for itself, and the devices of
    such a mesh."""
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
