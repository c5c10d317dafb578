"""The planner against exhaustive search, on clusters small enough for that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import event, given, settings

from kvloom.plan.board import Board, BoardPlacement, Unit
from kvloom.plan.cluster import Demand, MeshKind, Nodes, groups, mesh_kinds, meshes
from kvloom.plan.estimate import Estimator, Item
from kvloom.plan.search import SearchEffort, best_placement
from tests.examples import examples
from tests.plan.clusters import check, demand, formula, nodes, roofline, small_cases


def exhaustive(estimator: Estimator, cluster: Sequence[Nodes], replicas: int = 1) -> BoardPlacement | None:
    """Returns the best of all groups of meshes, all placements on them, and all numbers of replicas up to
    `replicas`; None if some model fits nowhere. Its cost grows exponentially."""
    found = groups(cluster, set(mesh_kinds(cluster)), 1 << 12)
    assert found is not None
    best: BoardPlacement | None = None
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


@pytest.mark.parametrize("effort", [SearchEffort(), SearchEffort(replicas=1)], ids=["replicas", "one each"])
@settings(deadline=None, max_examples=examples(30), derandomize=True)
@given(case=small_cases())
def test_a_placement_is_near_the_best_there_is(
    effort: SearchEffort, case: tuple[list[Nodes], list[Demand]]
) -> None:
    cluster, demands = case
    estimator = Estimator(demands, roofline)
    found = best_placement(estimator, cluster, effort)
    check(estimator, cluster, found)
    if effort.replicas == 1:
        assert len([item for unit in found.units for item in unit]) + len(found.left) == len(demands)
    best = exhaustive(estimator, cluster, replicas=2 if effort.replicas > 1 and len(demands) < 4 else 1)
    assert bool(found.left) == (best is None)
    if best is not None:
        event("short" if best.answered < 0.999 * sum(one.rate for one in demands) else "met")
        assert found.answered >= 0.95 * best.answered


def test_exhaustive_search_sees_every_placement() -> None:
    """Three models on two devices: the best puts the two light ones together."""
    demands = [demand("a", "llama-7b", 20.0), demand("b", "llama-7b", 0.2), demand("c", "llama-7b", 0.2)]
    estimator = Estimator(demands, formula)
    cluster = [nodes("A100-80", 1, 2)]
    best = exhaustive(estimator, cluster)
    assert best is not None
    assert {frozenset(map(estimator.demand, unit)) for unit in best.units} == {
        frozenset({0}),
        frozenset({1, 2}),
    }
    assert exhaustive(estimator, [nodes("A10", 1)]) is None
