"""A borrower hands parts of its loan back, one after the other, and the loan may end meanwhile."""

from __future__ import annotations

import asyncio

from tests.engine.modelled_weaving import MODEL, PAGE, borrow, hot_unit
from tests.modelled import turns


def test_a_loan_may_end_when_nobody_waits_any_more_for_what_goes_back() -> None:
    """The unit is told to leave in the middle of a recall."""
    engine, _ = hot_unit(24, 32)

    async def play() -> None:
        borrow(engine, 1.0, 32)
        shedding = asyncio.create_task(engine.borrower.shed(MODEL, PAGE))
        await turns(1)
        shedding.cancel()
        await turns(1)
        engine.borrower.give_back_all()
        assert engine.borrower.loan(MODEL) is None

    asyncio.run(play())
