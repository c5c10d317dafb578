"""What drafted tokens bring and cost, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvloom.plan.cluster import MeshKind
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.cost.speculation import drafted_step, seconds_per_token, tokens_per_step
from kvloom.plan.cost.work import Work
from kvloom.plan.estimate import Estimator
from kvloom.types.spec import unit_abilities
from tests.plan.clusters import demand, roofline

SPECULATING = MeshKind("A100-80", 80 << 30, 1, unit_abilities("cpu", 1))


def test_tokens_of_a_step() -> None:
    assert [tokens_per_step(0.5, drafted) for drafted in range(4)] == [1.0, 1.5, 1.75, 1.875]
    assert tokens_per_step(0.8, 4) == pytest.approx(3.3616)
    assert tokens_per_step(0.0, 9) == 1.0
    assert tokens_per_step(1.0, 9) == 10.0


def test_the_work_of_a_verification() -> None:
    """Three rows of each sequence see what it holds and themselves and those before them; it is read once."""
    work = Work.verify("m", 1.0, [10, 20], 2)
    assert (work.batch, work.tokens, work.drawn, work.context) == (6, 6, 6, 30)
    assert work.pairs == (11 + 12 + 13) + (21 + 22 + 23)
    assert Work.verify("m", 1.0, [10, 20], 0) == Work.decode("m", 1.0, [10, 20])


class Steps:
    """Satisfies `CostModel`: 10 ms and 1 ms a row, a tenth of that for the model `s`."""

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        return (10 + work.tokens) / (10_000 if work.model == "s" else 1000)


def test_seconds_of_a_token() -> None:
    assert drafted_step(Steps(), "m", 1.0, [5], 3, None) == pytest.approx(0.014)
    assert drafted_step(Steps(), "m", 1.0, [5], 3, "s") == pytest.approx(0.014 + 3 * 0.0011)
    assert seconds_per_token(Steps(), "m", 1.0, [5], 0.0, "s") == pytest.approx(0.011)
    best = min((0.011 + k * 0.001 + k * 0.0011) / ((1 - 0.8 ** (k + 1)) / 0.2) for k in range(16))
    assert seconds_per_token(Steps(), "m", 1.0, [5], 0.8, "s") == pytest.approx(best)
    many = [5] * 64  # as many rows as a step with drafts may have
    assert seconds_per_token(Steps(), "m", 1.0, many, 0.99, None) == pytest.approx(0.074)


def test_small_batches_of_a_large_model_gain_on_a_device_and_large_ones_do_not() -> None:
    shapes = {name: find_shape(name) for name in ("llama-65b", "llama-7b")}
    cost = Roofline(find_device("A100-80"), 4, shapes)
    gains = []
    for batch in (1, 8, 64):
        plain = cost.seconds(Work.decode("llama-65b", 1.0, [500] * batch))
        gains.append(plain / seconds_per_token(cost, "llama-65b", 1.0, [500] * batch, 0.8, "llama-7b"))
    assert gains[0] > 1.3
    assert gains[0] >= gains[1] >= gains[2] == 1.0


def test_an_estimate_counts_on_a_model_that_drafts_if_it_is_on_the_unit() -> None:
    large = replace(demand("a", "llama-13b", 0.1), speculation="b", acceptance=0.9)
    small = demand("b", "llama-7b", 0.1)
    estimator = Estimator([large, small], roofline)
    a, b = estimator.item(0, 1), estimator.item(1, 1)
    alone, beside = (estimator.candidate(SPECULATING, a, items) for items in ((a,), (a, b)))
    assert alone is not None
    assert beside is not None
    assert beside.full.seconds[0] < alone.full.seconds[0]
    assert estimator.served(SPECULATING, a, (a, b)).speculation == "b"
    assert estimator.served(SPECULATING, a, (a,)).speculation == "none"
    silent = SPECULATING._replace(abilities=unit_abilities("A100-80", 1))
    assert estimator.served(silent, a, (a, b)).speculation == "none"
