"""The queueing model of weaving, and algorithm 1: the paper's example, and what holds for any operators."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.offload.queueing import Gap, conditional_wait, expected_stall, split

# Llama-3-8B on an A100, batch 128, in microseconds: norm, qkv, rope, o, norm, gate and up, activation, down,
# add, of 32 layers, and the head
LAYER = [5.0, 43.0, 4.0, 32.0, 5.0, 191.0, 17.0, 111.0, 3.0]
LLAMA = [*LAYER * 32, 961.0]
MOST = 0.05 * 25_000 / 32

TIMES = st.lists(st.floats(1e-2, 1e3), min_size=1, max_size=40)


def cut(times: list[float], parts: list[int]) -> list[float]:
    """The times of all parts."""
    return [t / n for t, n in zip(times, parts, strict=True) for _ in range(n)]


@pytest.mark.parametrize(
    ("ahead", "beyond", "stall"),
    [(0, 91.75, 91.75), (20, 120.9, 74.7), (50, 157.5, 56.1), (100, 222.4, 35.8)],
)
def test_waits_of_the_papers_example(ahead: float, beyond: float, stall: float) -> None:
    assert len(LLAMA) == 289
    assert conditional_wait(LLAMA, ahead) == pytest.approx(beyond, rel=1e-3)
    assert expected_stall(LLAMA, ahead) == pytest.approx(stall, rel=2e-3)
    assert expected_stall(LLAMA, -ahead) == expected_stall(LLAMA, 0)


@pytest.mark.parametrize(("ahead", "splits"), [(0, 53), (20, 19), (50, 2), (1000, 0)])
def test_splits_of_the_papers_example(ahead: float, splits: int) -> None:
    parts = split(LLAMA, ahead, MOST)
    assert sum(parts) - len(parts) == splits
    assert parts[-1] > 1 or not splits  # the head goes first
    assert expected_stall(cut(LLAMA, parts), ahead) <= MOST


def test_halving_at_random_can_make_the_condition_worse() -> None:
    """Why the longest goes first."""
    assert conditional_wait([300, 110], 100) == pytest.approx(195.5, rel=1e-3)
    assert conditional_wait([300, 55, 55], 100) == pytest.approx(200)


def test_is_what_arrivals_at_random_find() -> None:
    draw = random.Random(1)
    met = draw.choices(LLAMA, LLAMA, k=200_000)
    waits = [draw.random() * t for t in met]
    beyond = [w for w in waits if w > 50]
    assert conditional_wait(LLAMA, 50) == pytest.approx(sum(beyond) / len(beyond), rel=0.02)
    assert expected_stall(LLAMA, 50) == pytest.approx(sum(w - 50 for w in beyond) / len(waits), rel=0.02)


@given(times=TIMES, ahead=st.floats(-10, 1e3))
def test_waits_are_within_their_bounds(times: list[float], ahead: float) -> None:
    c, longest = max(0.0, ahead), max(times)
    wait, stall = conditional_wait(times, ahead), expected_stall(times, ahead)
    assert 0 <= stall <= max(0.0, longest - c)
    assert wait == 0 if longest <= c else c * (1 - 1e-9) <= wait <= longest
    assert stall <= wait * (1 + 1e-9) + 1e-12


@given(times=TIMES, ahead=st.floats(-10, 100), most=st.floats(1e-2, 100), data=st.data())
def test_a_split_ends_below_the_bound_or_where_no_cut_helps(
    times: list[float], ahead: float, most: float, data: st.DataObject
) -> None:
    limits = [data.draw(st.integers(1, 8)) for _ in times]
    parts, c = split(times, ahead, most, limits), max(0.0, ahead)
    assert all(1 <= n <= limit for n, limit in zip(parts, limits, strict=True))
    pieces = cut(times, parts)
    assert len(pieces) == sum(parts)
    assert expected_stall(pieces, ahead) <= expected_stall(times, ahead) * (1 + 1e-9)
    if expected_stall(pieces, ahead) > most * (1 + 1e-6):
        # halves of halves may be twice as long as parts of one size
        for t, n, limit in zip(times, parts, limits, strict=True):
            assert n == limit or t / n <= 2 * c


@given(times=TIMES, most=st.floats(1e-2, 100))
def test_only_what_is_longest_is_split(times: list[float], most: float) -> None:
    parts = split(times, 0.0, most, [64] * len(times))
    whole = max((t for t, n in zip(times, parts, strict=True) if n == 1), default=0.0)
    for t, n in zip(times, parts, strict=True):
        assert n == 1 or t >= whole


@given(times=TIMES)
def test_enough_is_enough(times: list[float]) -> None:
    assert split(times, 0.0, expected_stall(times, 0.0) * (1 + 1e-9)) == [1] * len(times)


def test_a_gap_counts_by_its_share_of_the_time() -> None:
    draw = random.Random(2)
    met = draw.choices([*LLAMA, 5_000.0], [*LLAMA, 5_000.0], k=200_000)
    waits = [draw.random() * (t if t < 5_000 else 60.0) for t in met]
    gap, beyond = Gap(5_000.0, 30.0), [w - 20 for w in waits if w > 20]
    assert expected_stall(LLAMA, 0, gap) == pytest.approx(sum(waits) / len(waits), rel=0.02)
    assert expected_stall(LLAMA, 20, gap) == pytest.approx(sum(beyond) / len(waits), rel=0.02)
    assert conditional_wait(LLAMA, 20, gap) == pytest.approx(20 + sum(beyond) / len(beyond), rel=0.02)
    assert expected_stall([4.0], 0, Gap(4.0, 100.0)) == 2.0  # no wake takes longer than the gap
    assert expected_stall([4.0], 0, Gap(12.0, 0.0)) == 0.5  # somebody is there at once
