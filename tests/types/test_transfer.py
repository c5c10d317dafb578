"""A transfer's states, as data."""

from __future__ import annotations

from itertools import product

import pytest

from kvloom.types.transfer import NEXT, TransferState
from tests.kv.transfers import Shelf, address_of
from tests.kv.trees import PAGE

LIVE = (TransferState.PLANNED, TransferState.CLAIMED, TransferState.COPYING)


@pytest.mark.parametrize(("before", "after"), list(product(TransferState, repeat=2)))
def test_only_a_state_that_may_follow_follows(before: TransferState, after: TransferState) -> None:
    transfer = Shelf(address_of(PAGE, 0, 8), 0, 8)
    transfer.state = before
    if after in NEXT[before]:
        transfer.become(after)
        assert transfer.state is after
    else:
        with pytest.raises(ValueError, match=f"from {before.value} to {after.value}"):
            transfer.become(after)
        assert transfer.state is before
    assert transfer.over == (transfer.state not in LIVE)


def test_every_live_state_may_fail_and_nothing_follows_an_end() -> None:
    assert all(TransferState.FAILED in NEXT[state] for state in LIVE)
    assert not any(NEXT[state] for state in TransferState if state not in LIVE)


def test_what_has_been_sent_never_goes_back_and_never_past_the_end() -> None:
    transfer = Shelf(address_of(PAGE, 0, 8), 2, 6)
    seen = []
    for computed in (1, 4, 3, 9):
        transfer.advance(computed)
        seen.append(transfer.sent)
    assert seen == [2, 4, 4, 6]
