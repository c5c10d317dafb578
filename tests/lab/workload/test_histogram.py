"""Quantiles within half a percent, and sums over time that lose nothing."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.lab.workload.summary import MOST_STRETCHES, Histogram, Series

RELATIVE = 0.005
AT = (0.0, 0.01, 0.5, 0.8, 0.95, 0.99, 0.999, 1.0)

values = st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e6)), min_size=1, max_size=200)


def filled(numbers: list[float]) -> Histogram:
    histogram = Histogram()
    for number in numbers:
        histogram.add(number)
    return histogram


def ranked(numbers: list[float]) -> list[float]:
    """Returns the quantiles of AT, exactly."""
    count = len(numbers)
    ranks = [max(1, math.ceil(Fraction(str(q)) * count)) for q in AT]
    return [sorted(numbers)[rank - 1] for rank in ranks]


def test_high_quantiles_of_few_values_are_the_largest() -> None:
    assert filled([318.0, 11.0]).quantiles((0.5, 0.8, 0.95, 0.99)) == pytest.approx(
        [11, 318, 318, 318], rel=RELATIVE
    )
    assert filled([1.0, 2.0, 3.0]).quantiles((0.99,)) == [3.0]


def test_the_p99_of_few_latencies_is_the_longest() -> None:
    latency = filled([1.0, 2.0, 3.0]).latency()
    assert latency is not None
    assert latency.p50 == pytest.approx(2.0, rel=RELATIVE)
    assert latency.p99 == 3.0


@settings(max_examples=150, deadline=None)
@given(values)
def test_quantiles_are_of_the_nearest_rank(numbers: list[float]) -> None:
    histogram = filled(numbers)
    assert histogram.quantiles(AT) == pytest.approx(ranked(numbers), rel=RELATIVE)
    assert histogram.mean == pytest.approx(np.mean(numbers))
    assert (histogram.least, histogram.most) == (min(numbers), max(numbers))


@pytest.mark.parametrize("draw", ["exponential", "lognormal", "two peaks"])
def test_many_values(draw: str) -> None:
    rng = np.random.default_rng(0)
    numbers = {
        "exponential": rng.exponential(0.1, 50_000),
        "lognormal": rng.lognormal(-2, 2, 50_000),
        "two peaks": np.concatenate((rng.normal(1, 0.01, 25_000), rng.normal(50, 1, 25_001))),
    }[draw]
    found = filled(numbers.tolist()).quantiles((0.5, 0.8, 0.95, 0.99))
    assert found == pytest.approx(np.percentile(numbers, [50, 80, 95, 99]), rel=RELATIVE)


@settings(max_examples=50, deadline=None)
@given(values, values)
def test_merged_is_as_if_added_to_one(ones: list[float], others: list[float]) -> None:
    merged = filled(ones)
    merged.merge(filled(others))
    together = filled(ones + others)
    assert merged.quantiles(AT) == together.quantiles(AT)
    assert merged.count == together.count
    assert merged.mean == pytest.approx(together.mean)


def test_memory_is_bounded_in_the_number_of_values() -> None:
    histogram = filled([1e-9 * 1.0003**i for i in range(115_000)])
    assert histogram.most > 9e5
    assert histogram.buckets < 4400


def test_nothing() -> None:
    assert Histogram().quantiles((0.5, 1.0)) == [0.0, 0.0]
    assert Histogram().mean == 0.0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5000), st.floats(0, 3000), st.floats(0, 100)), max_size=30))
def test_a_series_loses_nothing_and_stays_small(spans: list[tuple[float, float, float]]) -> None:
    series = Series()
    for begin, length, amount in spans:
        series.add(begin, begin + length, amount)
    sums = series.sums(series.width)
    assert len(sums) <= MOST_STRETCHES
    assert math.fsum(sums) == pytest.approx(math.fsum(amount for _, _, amount in spans), abs=1e-6)
    wider = series.sums(4 * series.width)
    assert len(wider) == -(-len(sums) // 4)
    assert wider == pytest.approx([sum(sums[i : i + 4]) for i in range(0, len(sums), 4)])


def test_a_series_that_grew_has_everything_in_its_place() -> None:
    series = Series(width=1.0)
    for at in (0, 100, 1000, 3000):
        series.add(at, at, at + 1)
    assert series.width == 16
    sums = series.sums(16)
    assert {place: amount for place, amount in enumerate(sums) if amount} == {
        0: 1,
        6: 101,
        62: 1001,
        187: 3001,
    }


def test_an_amount_lies_evenly_over_its_time() -> None:
    series = Series(width=1.0)
    series.add(0.5, 2.5, 8.0)
    series.add(3.0, 3.0, 1.0)
    assert series.sums(1.0) == [2.0, 4.0, 2.0, 1.0]
