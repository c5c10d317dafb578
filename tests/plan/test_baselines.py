"""Spatial partitioning and placement by free memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from kvloom.plan.cluster import Demand, Nodes, homes
from kvloom.plan.estimate import Estimator
from kvloom.plan.planner import memory_greedy, plan_placement, spatial, write_spatial
from kvloom.types.errors import ConfigError
from tests.plan.clusters import check, demand, muxserve, nodes, roofline, small_cases

CLUSTER = [nodes("A100-80", 8, 4)]
SIZES = {"llama-7b": 1, "llama-13b": 1, "llama-30b": 4, "llama-65b": 8}


def test_muxserves_spatial_baseline() -> None:
    """One, one, four and eight devices for the sizes: 32 in all."""
    demands = muxserve(0.9, 20.0)
    estimator = Estimator(demands, roofline)
    sizes = {f"m{i}": n for i, n in enumerate([1] * 16 + [4, 4, 8])}
    found = spatial(estimator, CLUSTER, sizes)
    check(estimator, CLUSTER, found)
    assert {
        estimator.demands[min(unit)].name: kind.gpus
        for kind, unit in zip(found.kinds, found.units, strict=True)
    } == sizes
    assert spatial(estimator, CLUSTER).answered >= found.answered
    plan = write_spatial(estimator, CLUSTER, found)
    assert {(m.prefill_share, m.decode_share, m.quota) for unit in plan.units for m in unit.models} == {
        (1.0, 1.0, 1.0)
    }
    assert len(plan.units) == 19


def test_popular_models_get_more_devices() -> None:
    estimator = Estimator([demand("hot", "llama-7b", 40.0), demand("cold", "llama-7b", 0.1)], roofline)
    found = spatial(estimator, [nodes("A100-80", 8)])
    sizes = {
        estimator.demands[min(unit)].name: kind.gpus
        for kind, unit in zip(found.kinds, found.units, strict=True)
    }
    assert sizes["hot"] == 4
    assert sizes["cold"] < 4


def test_more_models_than_meshes() -> None:
    estimator = Estimator([demand(name, "llama-7b", 1.0) for name in "abc"], roofline)
    with pytest.raises(
        ConfigError, match=r"no memory is left for c: .* in pieces that are too small; 1 more A100-80 would"
    ):
        spatial(estimator, [nodes("A100-80", 1, 2)])
    with pytest.raises(ConfigError, match="'a' does not fit on 3 devices"):
        spatial(estimator, [nodes("A100-80", 8)], {"a": 3, "b": 1, "c": 1})


@settings(deadline=None, max_examples=60)
@given(small_cases())
def test_baselines_are_plans(case: tuple[list[Nodes], list[Demand]]) -> None:
    cluster, demands = case
    estimator = Estimator(demands, roofline)
    for baseline in (spatial, memory_greedy):
        try:
            found = baseline(estimator, cluster)
        except ConfigError:
            continue
        check(estimator, cluster, found)
        assert homes(cluster, found.kinds)
        assert not found.left
        assert plan_placement(estimator, cluster).answered >= found.answered * (1 - 1e-9)
        if baseline is spatial:
            assert all(len(unit) == 1 for unit in found.units)


def test_by_free_memory() -> None:
    """Both meshes are alike: the popular ones go apart, then each to the less loaded."""
    rates = {"a": 8.0, "b": 6.0, "c": 1.0, "d": 0.5}
    estimator = Estimator([demand(name, "llama-7b", rate) for name, rate in rates.items()], roofline)
    kind = nodes("A100-80", 2).mesh(1)
    found = memory_greedy(estimator, [nodes("A100-80", 2)], [kind, kind])
    names = [{estimator.demands[item].name for item in unit} for unit in found.units]
    assert names == [{"a"}, {"b", "c", "d"}]


def test_of_meshes_with_the_same_load_the_freest() -> None:
    estimator = Estimator([demand("a", "llama-7b", 1.0)], roofline)
    small, large = nodes("A100-40", 1).mesh(1), nodes("A100-80", 1).mesh(1)
    found = memory_greedy(estimator, [nodes("A100-40", 1), nodes("A100-80", 1)], [small, large])
    assert [len(unit) for unit in found.units] == [0, 1]


def test_equal_meshes_by_default() -> None:
    demands = [demand("a", "llama-65b", 0.2), demand("b", "llama-7b", 2.0), demand("c", "llama-7b", 1.0)]
    found = memory_greedy(Estimator(demands, roofline), [nodes("A100-80", 8)])
    assert [kind.gpus for kind in found.kinds] == [2, 2, 2, 2]
