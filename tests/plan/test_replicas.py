"""Popular models get several meshes; work is bounded by counting, not by the clock."""

from __future__ import annotations

from collections import Counter

import pytest

from kvloom.plan.estimate import Estimator
from kvloom.plan.search import SearchEffort, best_placement
from tests.plan.clusters import check, demand, muxserve, nodes, roofline


def replicas_of(estimator: Estimator, units: tuple[frozenset[int], ...]) -> dict[str, int]:
    counts = Counter(estimator.demand(item) for unit in units for item in unit)
    return {estimator.demands[n].name: count for n, count in counts.items()}


def test_a_model_that_no_mesh_can_answer_gets_several() -> None:
    cluster = [nodes("A100-80", 1, 6)]
    estimator = Estimator([demand("hot", "llama-7b", 25.0), demand("cold", "llama-7b", 0.1)], roofline)
    found = best_placement(estimator, cluster, SearchEffort())
    assert replicas_of(estimator, found.units)["hot"] > 1
    alone = best_placement(estimator, cluster, SearchEffort(replicas=1))
    assert replicas_of(estimator, alone.units) == {"hot": 1, "cold": 1}
    assert found.answered == pytest.approx(25.1)
    assert alone.answered < 0.5 * found.answered


def test_replicas_that_there_is_no_memory_for_are_given_up() -> None:
    """Either model asks for more than all devices, and there is room for two of them on each."""
    cluster = [nodes("A100-80", 1, 2)]
    demands = [demand(name, "llama-30b", 500.0) for name in "ab"]
    found = best_placement(Estimator(demands, roofline), cluster, SearchEffort())
    assert not found.left
    assert [len(unit) for unit in found.units] == [1, 1]


def test_19_models_on_32_devices() -> None:
    """MuxServe's figure 5. An estimate takes some tenths of a millisecond at most."""
    cluster, demands = [nodes("A100-80", 8, 4)], muxserve(0.7, 30.0)
    estimator = Estimator(demands, roofline)
    assert SearchEffort.fit(cluster, len(demands)).evaluations == 40_800
    found = best_placement(estimator, cluster, SearchEffort(evaluations=8_000))
    check(estimator, cluster, found)
    assert found.answered == pytest.approx(sum(one.rate for one in demands))
    assert not found.left


def test_what_can_never_be_met_takes_no_longer_than_was_allowed() -> None:
    cluster, demands = [nodes("A100-80", 8, 4)], muxserve(0.9, 200.0)
    estimator = Estimator(demands, roofline)
    found = best_placement(estimator, cluster, SearchEffort(evaluations=2_000))
    check(estimator, cluster, found)
    assert not found.left
    assert 2_000 <= estimator.spent <= 4_000  # what was begun is ended


def test_100_models_on_1000_devices_of_three_kinds() -> None:
    shapes = ("llama-7b", "llama-7b", "llama-13b", "llama3-8b", "llama-30b")
    demands = [
        demand(f"m{i}", shapes[i % 5], 120.0 * (i + 1) ** -1.1, 200 + 7 * i, 100 + 3 * i) for i in range(100)
    ]
    cluster = [nodes("A100-80", 8, 75), nodes("H100", 8, 30), nodes("L40S", 4, 40)]
    estimator = Estimator(demands, roofline)
    found = best_placement(estimator, cluster, SearchEffort(evaluations=10_000))
    check(estimator, cluster, found)
    assert not found.left
    assert found.answered == pytest.approx(sum(one.rate for one in demands), rel=0.03)
    assert estimator.evaluations <= 14_000


def test_the_same_plan_each_time() -> None:
    cluster, demands = [nodes("A100-80", 4, 2)], muxserve(1.3, 20.0)[::3]
    first, second = (best_placement(Estimator(demands, roofline), cluster, SearchEffort()) for _ in range(2))
    assert first == second
