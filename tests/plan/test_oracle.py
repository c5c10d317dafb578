"""The planner against exhaustive search, on clusters small enough for that."""

from __future__ import annotations

import pytest
from hypothesis import event, given, settings

from kvloom.plan.cluster import Demand, Nodes
from kvloom.plan.estimate import Estimator
from kvloom.plan.planner import exhaustive
from kvloom.plan.replicas import best_placement
from kvloom.plan.search import SearchEffort
from tests.examples import examples
from tests.plan.clusters import check, demand, formula, nodes, roofline, small_cases


@settings(deadline=None, max_examples=examples(40), derandomize=True)
@given(small_cases())
def test_near_the_best_there_is(case: tuple[list[Nodes], list[Demand]]) -> None:
    cluster, demands = case
    estimator = Estimator(demands, roofline)
    found = best_placement(estimator, cluster, SearchEffort())
    check(estimator, cluster, found)
    best = exhaustive(estimator, cluster, replicas=2 if len(demands) < 4 else 1)
    if best is None:
        event("no room")
        assert found.left
        return
    assert not found.left
    event("short" if best.answered < 0.999 * sum(one.rate for one in demands) else "met")
    assert found.answered >= 0.95 * best.answered


@settings(deadline=None, max_examples=examples(20), derandomize=True)
@given(small_cases())
def test_and_so_with_one_replica_each(case: tuple[list[Nodes], list[Demand]]) -> None:
    cluster, demands = case
    estimator = Estimator(demands, roofline)
    found = best_placement(estimator, cluster, SearchEffort(replicas=1))
    assert len([item for unit in found.units for item in unit]) + len(found.left) == len(demands)
    best = exhaustive(estimator, cluster)
    if best is None:
        assert found.left
    else:
        assert not found.left
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
    with pytest.raises(ValueError, match="too large"):
        exhaustive(estimator, [nodes("A100-80", 8, 500)])
