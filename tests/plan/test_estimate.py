"""What a unit is expected to answer (MuxServe, equation 3)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.plan.cluster import Costs
from kvloom.plan.estimate import Estimator
from kvloom.plan.growth import AMPLE
from tests.plan.clusters import Crowded, demand, formula, nodes, roofline

ONE, FOUR = (nodes("A100-80", 4).mesh(n) for n in (1, 4))
SHAPES = ("llama-7b", "llama-13b", "llama3-8b")

wanted = st.lists(st.tuples(st.sampled_from(SHAPES), st.floats(0.05, 20)), min_size=2, max_size=4)


def estimator_of(pairs: list[tuple[str, float]], costs: Costs = roofline) -> Estimator:
    return Estimator([demand(f"m{n}", shape, rate) for n, (shape, rate) in enumerate(pairs)], costs)


def test_equation_3_by_hand() -> None:
    """Far beyond what can be answered, so that both batches are as large as they may be. With each step 26
    sequences of the first end, and 13 of the second: so many prompts are a job."""
    estimator = Estimator(
        [demand("a", "llama-7b", 1000.0, 50, 10), demand("b", "llama-7b", 1000.0, 100, 20)], formula
    )
    found = estimator.known(ONE, frozenset({estimator.item(0, 1), estimator.item(1, 1)}))
    step = 0.01 + 256 / (10_000 * 0.9)
    prefills = sum(256 / n * (0.01 + n * prompt / 10_000) for n, prompt in ((26, 50), (13, 100)))
    assert found.throughput == pytest.approx((256 / (prefills + 10 * step), 256 / (prefills + 20 * step)))
    assert found.answered == pytest.approx(sum(found.throughput))
    assert found.bound == "compute"


@settings(deadline=None, max_examples=60)
@given(wanted)
def test_company_never_helps(pairs: list[tuple[str, float]]) -> None:
    estimator = estimator_of(pairs)
    items = [estimator.item(n, 1) for n in range(len(pairs))]
    alone = [estimator.unit(FOUR, frozenset({item})) for item in items]
    together = estimator.unit(FOUR, frozenset(items))
    assert all(alone)
    if together is not None:
        assert together.answered <= sum(one.answered for one in alone if one) * (1 + 1e-9)
        assert (together.level >= 1.0) == (together.bound == "")
        assert together.answered <= sum(rate for _, rate in pairs) * (1 + 1e-9)


def test_decodes_that_take_turns_take_each_others_time() -> None:
    easy, turns = (
        estimator_of([("llama-7b", 3.0)] * 3, costs)
        for costs in (formula, lambda device, gpus, shapes: Crowded())
    )
    items = frozenset(easy.item(n, 1) for n in range(3))
    assert {turns.item(n, 1) for n in range(3)} == items
    assert easy.known(ONE, items).level > 1.5 * turns.known(ONE, items).level


def test_a_unit_without_models_and_one_that_does_not_fit() -> None:
    estimator = estimator_of([("llama-13b", 1.0)] * 3)
    items = [estimator.item(n, 1) for n in range(3)]
    assert estimator.known(ONE, frozenset()).level == AMPLE
    assert estimator.unit(ONE, frozenset(items[:2])) is not None
    assert estimator.unit(ONE, frozenset(items)) is None  # 78 GB of weights
    assert estimator.unit(FOUR, frozenset(items)) is not None


def test_units_are_estimated_once() -> None:
    told: list[int] = []
    estimator = Estimator([demand("a", "llama-7b", 1.0)], roofline, told.append)
    for replicas in range(1, 600):
        for _ in range(2):
            estimator.unit(ONE, frozenset({estimator.item(0, replicas)}))
    assert estimator.evaluations == 599
    assert told == [256, 512]


def test_replicas_share_the_rate() -> None:
    estimator = estimator_of([("llama-7b", 12.0)])
    third = estimator.item(0, 3)
    assert estimator.item(0, 3) == third != estimator.item(0, 1)
    assert (estimator.demand(third), estimator.rate(third)) == (0, 4.0)
    assert estimator.rate(estimator.split(third, 2)) == 2.0


def test_shares_grow_until_they_answer_the_demand_together() -> None:
    estimator = estimator_of([("llama-7b", 5.0), ("llama-7b", 5.0), ("llama-7b", 0.1)])
    items = [estimator.item(n, 1) for n in range(3)]
    few, all_three = estimator.settled(FOUR, items[2:]), estimator.settled(FOUR, items)
    assert few[0].share == 0.3
    assert all(0.3 <= one.share <= 0.9 for one in all_three)
    crowd = estimator_of([("llama-7b", 100.0)] * 3)
    assert [one.share for one in crowd.settled(ONE, [crowd.item(n, 1) for n in range(2)])] == [0.9, 0.9]


def test_memory_without_end() -> None:
    estimator = estimator_of([("llama-13b", 5.6)])
    items = [estimator.item(0, 1)]
    assert estimator.known(ONE, frozenset(items)).bound == "memory"
    endless = estimator.unbounded(ONE, items)
    assert endless.level >= 1.0
    assert endless.used > estimator.pool(ONE, items)
