"""Marks of axes: round, few, and within."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.workload.axis import Axis
from kvloom.workload.shown import show_number, show_seconds

values = st.lists(st.floats(1e-7, 1e7), min_size=1, max_size=20)


@settings(max_examples=150, deadline=None)
@given(values, st.booleans())
def test_every_value_has_its_place_and_marks_are_few(found: list[float], log: bool) -> None:
    axis = Axis.over(found, show_seconds, log=log)
    marks = axis.marks()
    assert 1 <= len(marks) <= 9
    assert marks == sorted(set(marks))
    places = [axis.place(mark) for mark in marks]
    assert all(0 <= place <= 1 for place in places)
    assert len(set(places)) == len(places)
    ordered = sorted(found)
    assert [axis.place(value) for value in ordered] == sorted(axis.place(value) for value in ordered)
    assert axis.low <= ordered[0] * 1.001
    assert axis.high >= ordered[-1] * 0.999


def test_round_marks() -> None:
    assert Axis(0, 97, show_number).marks(5) == [0, 20, 40, 60, 80]
    assert Axis(0, 1, show_number).marks(5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert Axis(0.005, 0.1, show_seconds, log=True).marks() == pytest.approx([0.005, 0.01, 0.02, 0.05, 0.1])
    assert Axis(1e-4, 1e3, show_seconds, log=True).marks() == pytest.approx([10.0**i for i in range(-4, 4)])


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 s"), (2.5e-6, "2.5 µs"), (0.0123, "12.3 ms"), (1.234, "1.23 s"), (3502.1, "3,502 s")],
)
def test_seconds(seconds: float, shown: str) -> None:
    assert show_seconds(seconds) == shown
