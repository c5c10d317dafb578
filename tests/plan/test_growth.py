"""Batches grow as step by step, only faster, and never beyond the pool."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.plan.growth import AMPLE, BATCHES, ModelShare, grow


def side(
    rate: float,
    prefill: float,
    step: float,
    each: float,
    request: int,
    occupied: float = 0.1,
    busy: float = 1.0,
) -> ModelShare:
    """A prefill takes `prefill` a sequence; a batch's decodes `step`, and `each` a sequence. The largest
    batch occupies `occupied` of the device."""
    return ModelShare(
        rate=rate,
        prefill=[prefill * b for b in BATCHES],
        decode=[step + each * b for b in BATCHES],
        occupied=[occupied * (1 + b / 256) / 2 for b in BATCHES],
        busy=busy,
        request=request,
    )


def equation_3(sides: list[ModelShare], at: list[int]) -> list[float]:
    """Throughput / rate of each, its decodes slowed down where all want more than the device."""
    serial = sum(one.prefill[a] for one, a in zip(sides, at, strict=True))
    ratios = []
    for i, (one, a) in enumerate(zip(sides, at, strict=True)):
        others = sum(o.busy * o.occupied[b] for j, (o, b) in enumerate(zip(sides, at, strict=True)) if j != i)
        seconds = serial + one.decode[a] * max(1.0, one.occupied[a] + others)
        ratios.append(BATCHES[a] / seconds / one.rate)
    return ratios


def by_steps(sides: list[ModelShare], pool: int) -> float:
    """The best score on the way, always growing whoever is furthest behind (MuxServe's estimator)."""
    at, best = [0] * len(sides), 0.0
    while True:
        ratios = equation_3(sides, at)
        best = max(best, sum(one.rate * min(1.0, r) for one, r in zip(sides, ratios, strict=True)))
        if min(ratios) >= 1.0:
            return best
        growing = [
            i
            for i, one in enumerate(sides)
            if at[i] + 1 < len(BATCHES)
            and sum(
                BATCHES[a + (j == i)] * other.request
                for j, (other, a) in enumerate(zip(sides, at, strict=True))
            )
            <= pool
        ]
        behind = [i for i in growing if ratios[i] < 1.0]
        if not behind:
            return best
        at[min(behind, key=ratios.__getitem__)] += 1


sides = st.lists(
    st.builds(
        side,
        st.floats(0.01, 50),
        st.floats(1e-4, 0.05),
        st.floats(0.1, 10),
        st.floats(1e-4, 0.1),
        st.integers(1, 50),
        st.floats(0.0, 1.0),
        st.floats(0.0, 1.0),
    ),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=200)
@given(sides, st.integers(5, 5000))
def test_it_answers_what_single_steps_do(sides: list[ModelShare], pool: int) -> None:
    found = grow(sides, pool)
    if found is None:
        assert sum(one.request for one in sides) > pool
        return
    answered = sum(one.rate * min(1.0, r) for one, r in zip(sides, found.ratios, strict=True))
    assert answered >= 0.95 * by_steps(sides, pool)
    assert found.used == sum(b * one.request for b, one in zip(found.batches, sides, strict=True)) <= pool
    assert found.ratios == pytest.approx(equation_3(sides, [BATCHES.index(b) for b in found.batches]))
    assert (found.bound == "") == (found.level >= 1.0)


def test_one_model_alone() -> None:
    found = grow([side(1.0, 0.0, 4.0, 0.0, 1)], 1000)
    assert found is not None
    assert found.batches == (12,)  # 12 / 4 s: ample; more would count for nothing
    assert found.ratios == (AMPLE,)


def test_what_keeps_it_from_more() -> None:
    full = grow([side(10.0, 0.0, 4.0, 0.0, 100)], 1000)
    assert full is not None
    assert (full.batches, full.ratios, full.bound) == ((10,), (0.25,), "memory")
    slow = grow([side(1000.0, 0.0, 4.0, 0.0, 1)], 1000)
    assert slow is not None
    assert (slow.batches, slow.bound) == ((256,), "compute")


def test_a_model_that_nobody_asks_for_takes_little() -> None:
    found = grow([side(0.0, 0.01, 1.0, 0.01, 10), side(8.0, 0.01, 1.0, 0.01, 10)], 100_000)
    assert found is not None
    assert found.batches[0] == 1
    assert found.level >= 1.0


def test_decodes_that_want_more_than_the_device_slow_each_other_down() -> None:
    whole, half = (
        side(1.0, 0.0, 4.0, 0.0, 1, occupied=part, busy=busy) for part, busy in ((1.0, 1.0), (1.0, 0.5))
    )
    alone, beside = grow([whole], 12), grow([whole, half], 24)
    assert alone is not None
    assert beside is not None
    assert beside.ratios[0] < alone.ratios[0]
    assert beside.ratios[0] == pytest.approx(
        equation_3([whole, half], [BATCHES.index(b) for b in beside.batches])[0]
    )


def test_memory_goes_to_models_by_their_rates() -> None:
    found = grow([side(2.0, 0.0, 10.0, 0.0, 1), side(8.0, 0.0, 10.0, 0.0, 1)], 40)
    assert found is not None
    assert found.batches == (8, 32)
    assert found.ratios == (0.4, 0.4)
