"""What one sequence knows of its drafts of n-grams that were not tried."""

from __future__ import annotations

import numpy as np
import pytest

from kvloom.engine.drafts.drafting import DraftState
from kvloom.engine.drafts.lengths import Acceptance
from kvloom.engine.drafts.ngrams import SIZES, NgramIndex
from kvloom.engine.sequence import TokenBuffer

PROMPT = [1, 2, 3]


def state_of(rate: float = 0.5) -> DraftState:
    return DraftState([Acceptance(2 * rate, 2.0) for _ in SIZES], NgramIndex(100))


@pytest.mark.parametrize(
    ("drafted", "came", "found"),
    [
        ([5, 6, 7], [], (0, 0)),
        ([5, 6, 7], [5], (1, 1)),
        ([5, 6, 7], [5, 6, 7, 8], (3, 3)),
        ([5, 6, 7], [5, 9, 7], (1, 3)),
        ([5, 6, 7], [4, 6, 7], (0, 3)),
        (list(range(20, 32)), list(range(20, 32)), (8, 8)),
    ],
)
def test_untried_drafts_are_compared_once(
    drafted: list[int], came: list[int], found: tuple[int, int]
) -> None:
    state = state_of()
    state.leave_untried(drafted, len(PROMPT))
    tokens = TokenBuffer(np.array(PROMPT + came, np.int64))
    assert state.compare(tokens) == found
    assert state.compare(tokens) == (0, 0)


def test_wrong_drafts_back_off_for_longer_and_longer() -> None:
    state, waits = state_of(0.1), list[int]()
    for _ in range(8):
        state.leave_untried([5, 6], 0)
        waits.append(0)
        while state.tick_backoff():
            waits[-1] += 1
        state.note_verified(0, 2)
    assert waits == [16, 32, 64, 128, 256, 512, 1024, 1024]


@pytest.mark.parametrize(("right", "backoff"), [(2, 16), (1, 256)])
def test_several_right_drafts_make_the_next_backoff_short(right: int, backoff: int) -> None:
    """A single one may be chance."""
    state = state_of(0.1)
    for _ in range(4):
        state.leave_untried([5, 6], 0)
    state.note_verified(right, right)
    assert state.backoff == backoff


def test_likely_drafts_do_not_back_off() -> None:
    state = state_of(0.6)
    state.leave_untried([5, 6], 0)
    assert not state.tick_backoff()
