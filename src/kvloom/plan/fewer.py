"""Makes a plan use fewer devices, as long as it stays ample: more devices would answer nothing more, and may
be slower, as ranks wait for each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvloom.plan.board import Board, BoardPlacement
from kvloom.plan.cluster import MeshKind, Nodes
from kvloom.plan.estimate import Estimator, Item
from kvloom.plan.growth import AMPLE

_WIDTH: Final = 8  # units that are tried for an item, those with most to spare


@dataclass(frozen=True, slots=True)
class _PlacedUnit:
    """Items on a mesh."""

    kind: MeshKind
    items: frozenset[Item]


_Units = list[_PlacedUnit]


def with_fewer_devices(
    estimator: Estimator, cluster: Sequence[Nodes], placement: BoardPlacement
) -> BoardPlacement:
    """Returns a placement on fewer devices of the cluster, if that is as ample: each unit could answer AMPLE
    times its requests, and a model with an objective is in time if it is alone. Else it returns the same one.

    Units give their models away to others, the least busy unit first, and meshes become smaller; both orders
    are tried. It is a descent, which need not find the fewest possible."""
    units = [_PlacedUnit(*one) for one in zip(placement.kinds, placement.units, strict=True) if one[1]]
    descent = _Descent(estimator, cluster)
    if placement.left or not units or any(descent.level(unit) < AMPLE for unit in units):
        return placement
    orders = (
        descent.shrunk(descent.merged(units)),
        descent.merged(descent.shrunk(units)),
    )
    best = min(orders, key=_devices)
    if _devices(best) >= _devices(units):
        return placement
    return Board(estimator, [one.kind for one in best], 1, [one.items for one in best]).placement(())


def _devices(units: _Units) -> int:
    return sum(unit.kind.gpus for unit in units)


class _Descent:
    def __init__(self, estimator: Estimator, cluster: Sequence[Nodes]) -> None:
        self._estimator = estimator
        self._smaller = {
            nodes.mesh(size): [nodes.mesh(other) for other in reversed(nodes.sizes) if other < size]
            for nodes in cluster
            for size in nodes.sizes
        }

    def level(self, unit: _PlacedUnit) -> float:
        """Returns the smallest of throughput / rate; 0 if the items do not fit, or would be late."""
        estimate = self._estimator.unit(unit.kind, unit.items)
        if estimate is None or any(self._late(unit.kind, item) for item in unit.items):
            return 0.0
        return estimate.level

    def _late(self, kind: MeshKind, item: Item) -> bool:
        demand = self._estimator.demands[self._estimator.demand(item)]
        candidate = self._estimator.candidate(kind, item)
        if demand.slo is None or candidate is None:
            return False
        step = candidate.full.seconds[candidate.start] / demand.output
        return candidate.prefill[0] > demand.slo.ttft or step > demand.slo.tpot

    def shrunk(self, units: _Units) -> _Units:
        """Returns the units on the smallest meshes that are ample."""
        return [next(self._ample(unit), unit) for unit in units]

    def _ample(self, unit: _PlacedUnit) -> Iterator[_PlacedUnit]:
        for kind in self._smaller[unit.kind]:
            smaller = replace(unit, kind=kind)
            if self.level(smaller) >= AMPLE:
                yield smaller

    def merged(self, units: _Units) -> _Units:
        """Returns the units without those whose items others can have."""
        left = list(units)
        for unit in sorted(units, key=self._compute):
            at = next((at for at, one in enumerate(left) if one.items == unit.items), None)
            if at is not None and (without := self._without(left, at)) is not None:
                left = without
        return left

    def _compute(self, unit: _PlacedUnit) -> tuple[float, int]:
        """Returns the operations a second and device, and the number of devices, the larger the earlier."""
        rates = (
            self._estimator.rate(item) * self._estimator.demands[self._estimator.demand(item)].flops
            for item in unit.items
        )
        return sum(rates) / unit.kind.gpus, -unit.kind.gpus

    def _without(self, units: _Units, at: int) -> _Units | None:
        """Returns the units without one of them, whose items others have; None if not all would be ample."""
        rest: _Units | None = units[:at] + units[at + 1 :]
        for item in sorted(units[at].items, key=self._estimator.rate, reverse=True):
            if rest is not None:
                rest = self._dropped(rest, item) or self._moved(rest, item)
        return rest

    def _dropped(self, units: _Units, item: Item) -> _Units | None:
        """Returns the units with one replica less of the item's demand, if there are others."""
        demand = self._estimator.demand(item)
        holders = [at for at, unit in enumerate(units) if self._holds(unit, demand)]
        if not holders:
            return None
        fewer = self._estimator.item(demand, len(holders))
        found = list(units)
        for at in holders:
            others = frozenset(one for one in units[at].items if self._estimator.demand(one) != demand)
            found[at] = replace(units[at], items=others | {fewer})
        return found if all(self.level(found[at]) >= AMPLE for at in holders) else None

    def _moved(self, units: _Units, item: Item) -> _Units | None:
        """Returns the units with the item at the one that is fullest with it, of those with most to spare."""
        demand = self._estimator.demand(item)
        able = [at for at, unit in enumerate(units) if not self._holds(unit, demand)]
        able.sort(key=lambda at: self._compute(units[at]))
        options = []
        for at in able[:_WIDTH]:
            unit = replace(units[at], items=units[at].items | {item})
            level = self.level(unit)
            if level >= AMPLE:
                options.append((-self._compute(unit)[0], at, unit))
        if not options:
            return None
        _, at, unit = min(options, key=lambda option: option[:2])
        return [*units[:at], unit, *units[at + 1 :]]

    def _holds(self, unit: _PlacedUnit, demand: int) -> bool:
        return any(self._estimator.demand(item) == demand for item in unit.items)
