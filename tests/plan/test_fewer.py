"""Plans that are ample have the fewest devices, and others are as they were."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from kvloom.plan.board import BoardPlacement
from kvloom.plan.cluster import Demand, Nodes
from kvloom.plan.estimate import Estimator
from kvloom.plan.fewer import with_fewer_devices
from kvloom.plan.growth import AMPLE
from kvloom.plan.planner import make_plan
from kvloom.plan.search import SearchEffort, best_placement
from kvloom.types.spec import Slo
from tests.plan.clusters import check, demand, nodes, roofline, small_cases


def devices(cluster: list[Nodes], *demands: Demand) -> int:
    return sum(unit.gpus for unit in make_plan(cluster, demands, roofline).units)


def test_two_small_models_on_two_large_gpus_have_one() -> None:
    cluster = [nodes("H100", 2)]
    assert devices(cluster, demand("a", "llama-7b", 0.02), demand("b", "llama-7b", 0.02)) == 1
    assert devices(cluster, demand("a", "llama-7b", 20.0), demand("b", "llama-7b", 20.0)) == 2


def test_little_traffic_needs_one_device_of_many_nodes() -> None:
    small = [demand(f"m{n}", "llama-7b", 0.05) for n in range(4)]
    assert devices([nodes("A100-80", 4, 4)], *small) == 1


def test_a_model_that_would_be_late_on_fewer_keeps_its_devices() -> None:
    """Eight GPUs read a large model faster than the two that hold it."""
    large = demand("large", "llama-65b", 0.001)
    cluster = [nodes("A100-80", 8)]
    few = devices(cluster, large)
    assert few < 8
    assert devices(cluster, replace(large, slo=Slo(ttft=5.0, tpot=0.04))) > few


@given(small_cases())
@settings(max_examples=15, deadline=None)
def test_fewer_is_as_ample(case: tuple[list[Nodes], list[Demand]]) -> None:
    cluster, wanted = case
    wanted = [replace(one, rate=one.rate / 30) for one in wanted]
    estimator = Estimator(wanted, roofline)
    before = best_placement(estimator, cluster, SearchEffort.fit(cluster, len(wanted)))
    after = with_fewer_devices(estimator, cluster, before)
    check(estimator, cluster, after)

    def used(placement: BoardPlacement) -> int:
        return sum(kind.gpus for kind, unit in zip(placement.kinds, placement.units, strict=True) if unit)

    if after is before:
        return
    assert used(after) < used(before)
    assert after.answered == pytest.approx(before.answered)
    assert all(
        estimator.known(kind, unit).level >= AMPLE
        for kind, unit in zip(after.kinds, after.units, strict=True)
        if unit
    )
