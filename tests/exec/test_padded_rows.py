"""Rows are filled up to few numbers, for each of which oneDNN compiles a product."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvloom.exec.attention import padded, padded_rows


@given(st.integers(1, 1 << 16))
def test_few_rows_are_added(rows: int) -> None:
    filled = padded_rows(rows)
    assert rows <= filled == padded_rows(filled)
    assert filled - rows < max(8, rows / 16)


def test_prompts_come_in_few_sizes() -> None:
    assert len({padded_rows(rows) for rows in range(1, 513)}) <= 50


@given(st.lists(st.integers(0, 99), max_size=40))
def test_the_last_value_is_repeated(values: list[int]) -> None:
    found = padded(np.array(values, np.int64)).tolist()
    assert found[: len(values)] == values
    assert set(found[len(values) :]) <= set(values[-1:])
    assert len(found) == (padded_rows(len(values)) if values else 0)
