"""Whose weights are awake in a budget, how long the others wait, and plans that count on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import exp, inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as but

from kvloom.plan.cluster import CPU, Demand, Nodes
from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.estimate import Estimator
from kvloom.plan.growth import BEYOND
from kvloom.plan.plan import PlacementPlan
from kvloom.plan.planner import make_plan, plan_placement
from kvloom.plan.residency import characteristic_time, mean_wait, unit_residency
from kvloom.types.errors import ConfigError
from kvloom.types.spec import Slo, shared_bytes
from tests.plan.clusters import check_plan, formula

SHAPE = ModelShape(layers=12, hidden=1024, heads=8, kv_heads=2, head_dim=64, ffn=2048, vocab=2000, itemsize=4)
SIZE = SHAPE.weight_bytes
HUGE = but(SHAPE, ffn=1 << 20)  # it takes 10 s to load
WHOLE = 20 / 19  # of a budget, of which one part in twenty stays free

_models = st.lists(st.tuples(st.floats(1e-6, 1e3), st.integers(1, 10**11)), min_size=1, max_size=12)


def filled(rates: Sequence[float], sizes: Sequence[int], time: float) -> float:
    return sum(size * (1.0 - exp(-rate * time)) for rate, size in zip(rates, sizes, strict=True))


@given(_models, st.floats(0.001, 0.999))
def test_the_characteristic_time_fills_the_room(models: list[tuple[float, int]], part: float) -> None:
    rates, sizes = zip(*models, strict=True)
    room = part * sum(sizes)
    time = characteristic_time(rates, sizes, room)
    assert filled(rates, sizes, time) == pytest.approx(room, rel=1e-6)
    assert characteristic_time(rates, sizes, sum(sizes)) == inf


def test_it_rises_with_the_room_and_the_popular_are_awake_longer() -> None:
    rates, sizes = [4.0, 2.0, 1.0, 0.5], [3, 5, 2, 7]
    times = [characteristic_time(rates, sizes, room) for room in (1.0, 4.0, 9.0, 16.0)]
    assert all(a < b for a, b in pairwise(times))
    awake = unit_residency(rates, sizes, 9.0, 1e3).awake
    assert list(awake) == sorted(awake, reverse=True)


def test_models_that_are_alike_share_the_room_and_those_that_fit_are_awake() -> None:
    three = unit_residency([0.1] * 8, [10] * 8, 30.0, 1e3)
    assert three.awake == pytest.approx([3 / 8] * 8)
    assert unit_residency([0.1] * 8, [10] * 8, 39.0, 1e3).awake == pytest.approx([3 / 8] * 8)  # whole models
    fit = unit_residency([0.1] * 8, [10] * 8, 80.0, 1e3)
    assert (fit.awake, fit.busy) == ((1.0,) * 8, 0.0)
    assert fit.late(0, 1.0) == 0.0


def test_the_wait_of_a_queue() -> None:
    constant = mean_wait([0.3, 0.5], [1.0, 1.0])  # M/D/1
    assert constant == pytest.approx(0.8 / (2 * 0.2))
    steps = [
        (n + 0.5) / 1000 for n in range(20_000)
    ]  # the exponential distribution of mean 1, in steps: M/M/1
    weights = [exp(-time) / 1000 for time in steps]
    assert mean_wait([0.6 * weight for weight in weights], steps) == pytest.approx(0.6 / 0.4, rel=1e-3)
    assert mean_wait([1.0], [1.0]) == inf
    assert mean_wait([0.0], [1.0]) == 0.0


def test_who_waits_too_long() -> None:
    found = unit_residency([1.0, 1.0], [100, 100], 100.0, 200.0)  # 0.5 s each, one wake a second
    assert found.busy == pytest.approx(0.5)
    assert found.waits == pytest.approx([0.75, 0.75])
    assert found.late(0, 0.4) == 1.0
    assert found.late(0, 0.5) == pytest.approx(0.5)  # it waits at all
    assert found.late(0, 1.0) == pytest.approx(0.5 * exp(-1.0))


def planned(
    count: int, holds: float, *, machines: int = 1, rate: float = 0.01, shape: ModelShape = SHAPE
) -> PlacementPlan:
    """Models by a power law, on machines of one core that hold so many of them."""
    demands = [Demand(f"m{n}", shape, rate / (n + 1), 40.0, 20.0) for n in range(count)]
    budget = int(holds * shape.weight_bytes * WHOLE)
    return make_plan([Nodes(CPU, 64 << 30, 1, machines, budget=budget)], demands, formula)


def test_models_that_are_larger_than_their_budget() -> None:
    plan = planned(8, 3.5)
    check_plan(plan)
    (unit,) = plan.units
    assert unit.memory == int(3.5 * SIZE * WHOLE)
    assert unit.kv_bytes == pytest.approx(shared_bytes(unit.memory) - 3 * SIZE, abs=2)
    assert sum(model.awake for model in unit.models) == pytest.approx(3.0)
    assert all(0.02 < model.cold_wait < 0.03 for model in unit.models)
    unit.check_pool(16 << 10)
    unit.check_sleep()


def test_models_that_fit_stay_awake() -> None:
    (unit,) = planned(3, 3.5).units
    assert {(model.awake, model.cold_wait) for model in unit.models} == {(1.0, 0.0)}


def test_cold_models_spread() -> None:
    """Their load would be nothing to one machine."""
    plan = planned(6, 3.5, machines=2)
    assert {len(unit.models) for unit in plan.units} == {3}
    assert {model.awake for unit in plan.units for model in unit.models} == {1.0}


@pytest.mark.parametrize("seed", [4, 5, 8])
def test_models_of_many_sizes_are_spread_as_well_as_can_be(seed: int) -> None:
    drawn = Random(seed)
    shapes = [but(SHAPE, layers=drawn.choice([4, 8, 12, 24])) for _ in range(9)]
    demands = [Demand(f"m{n}", shape, 0.01 / (n + 1), 40.0, 20.0) for n, shape in enumerate(shapes)]
    budget = int(0.42 * sum(shape.weight_bytes for shape in shapes) * WHOLE)
    cluster = [Nodes(CPU, 64 << 30, 1, 2, budget=budget)]
    estimator = Estimator(demands, formula)
    found = plan_placement(estimator, cluster)
    here = [estimator.item(n, 1) for n in range(9)]
    parts = [frozenset(item for n, item in enumerate(here) if mask >> n & 1) for mask in range(1 << 8)]
    sides = [(part, frozenset(here) - part) for part in parts]
    scores = [[estimator.unit(cluster[0].mesh(1), side) for side in pair] for pair in sides]
    best = max(a.score + b.score for a, b in scores if a and b)
    more = 0.02 * sum(demand.rate for demand in demands)  # cold requests a second
    assert found.score >= best - more * BEYOND


def test_a_cold_request_that_is_late_counts_for_nothing() -> None:
    """Of two models of 10 s, the one whose first token may take a minute is the one that is beside others."""
    demands = [
        replace(Demand(name, HUGE, 0.01, 40.0, 20.0), slo=Slo(ttft=ttft))
        for name, ttft in (("a", 2.0), ("b", 600.0), ("c", 600.0))
    ]
    budget = int(1.2 * HUGE.weight_bytes * WHOLE)
    plan = make_plan([Nodes(CPU, 1 << 40, 1, 2, budget=budget)], demands, formula)
    assert {"a"} in [{model.name for model in unit.models} for unit in plan.units]


def test_what_cannot_be() -> None:
    with pytest.raises(
        ConfigError, match=r"model 'm0' needs .* for weights and one request; .* a --memory of"
    ):
        planned(8, 0.9)
    with pytest.raises(ConfigError, match=r"no memory is left for .*m\d.* would hold all"):
        planned(8, 3.5, rate=1.0, shape=HUGE)
