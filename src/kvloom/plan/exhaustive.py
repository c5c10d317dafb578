"""Every placement on a small cluster: what the planner is measured against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from kvloom.plan.board import Board, Placement, Unit
from kvloom.plan.cluster import MeshKind, Nodes, mesh_kinds
from kvloom.plan.estimate import Estimator, Item
from kvloom.plan.mesh import groups, meshes

_MOST = 1 << 12


def exhaustive(estimator: Estimator, cluster: Sequence[Nodes], replicas: int = 1) -> Placement | None:
    """The best of all groups of meshes, all placements on them, and all numbers of replicas up to `replicas`;
    None where some model fits nowhere. Its cost grows exponentially."""
    found = groups(cluster, set(mesh_kinds(cluster)), _MOST)
    if found is None:
        raise ValueError("the cluster is too large for exhaustive search")
    best: Placement | None = None
    for counts in product(range(1, replicas + 1), repeat=len(estimator.demands)):
        items = [estimator.item(demand, n) for demand, n in enumerate(counts) for _ in range(n)]
        for group in found:
            kinds = meshes(cluster, group)
            for units in _assign(estimator, kinds, items, [frozenset()] * len(kinds)):
                placement = Board(estimator, kinds, 1, units).placement(())
                if best is None or placement.rank > best.rank:
                    best = placement
    return best


def _assign(
    estimator: Estimator, kinds: Sequence[MeshKind], items: Sequence[Item], units: list[Unit]
) -> Iterator[list[Unit]]:
    if not items:
        yield list(units)
        return
    seen: set[tuple[MeshKind, Unit]] = set()
    for at, kind in enumerate(kinds):
        unit = units[at]
        if items[0] in unit or (kind, unit) in seen or estimator.unit(kind, unit | {items[0]}) is None:
            continue
        seen.add((kind, unit))  # another mesh like it leads to the same
        units[at] = unit | {items[0]}
        yield from _assign(estimator, kinds, items[1:], units)
        units[at] = unit
