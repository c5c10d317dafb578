"""Rows that begin with the same pages are found, and told apart where they branch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.kv.shared import shared_prefixes

T = 16


def test_rows_without_a_page_in_common_share_nothing() -> None:
    tables = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert shared_prefixes(tables, np.array([60, 60, 60]), T) is None
    assert shared_prefixes(tables[:1], np.array([60]), T) is None


def test_a_page_that_may_still_be_written_is_not_shared() -> None:
    tables = np.array([[5, 0], [5, 0]], np.int32)  # what follows the first page is padding
    found = shared_prefixes(tables, np.array([15, 15]), T)  # two tokens of one sequence
    assert found is not None
    assert found.common.tolist() == [0, 0]
    assert found.joined.tolist() == [False, True]
    found = shared_prefixes(tables, np.array([16, 31]), T)
    assert found is not None
    assert found.common.tolist() == [0, 16]


ROWS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(0, T - 1)), min_size=1, max_size=12
)


@settings(deadline=None, max_examples=100)
@given(ROWS)
def test_neighbours_share_what_their_tables_do(rows: list[tuple[list[int], int]]) -> None:
    """A page's number says all pages before it, as in a prefix tree."""
    width = max(len(path) for path, _ in rows) + 1
    tables = np.zeros((len(rows), width), np.int32)
    for row, (path, _) in enumerate(rows):
        for i in range(len(path)):
            tables[row, i] = 1 + sum((digit + 1) * 4**j for j, digit in enumerate(path[: i + 1]))
    lengths = np.array([len(path) * T + rest for path, rest in rows])
    found = shared_prefixes(tables, lengths, T)

    def both(a: int, b: int) -> int:
        pages = 0
        for x, y in zip(rows[a][0], rows[b][0], strict=False):
            if x != y:
                break
            pages += 1
        return pages * T

    if found is None:
        assert all(both(a, b) == 0 for a in range(len(rows)) for b in range(a))
        return
    order = found.order.tolist()
    assert sorted(order) == list(range(len(rows)))
    assert found.common.tolist() == [0, *(both(a, b) for a, b in pairwise(order))]
    # Every pair shares the least that lies between its two rows, so no group is torn.
    for i in range(len(order)):
        for j in range(i):
            assert both(order[i], order[j]) == min(found.common[j + 1 : i + 1])
