"""A borrower hands parts of its loan back, one after the other, and the loan may end meanwhile."""

from __future__ import annotations

import asyncio

from tests.engine.modelled_weaving import MODEL, PAGE, borrow, hot_unit
from tests.engine.plays import serve
from tests.modelled import turns


def test_a_page_is_left_however_often_a_part_is_asked_for() -> None:
    engine, executor = hot_unit(24, 32)

    async def play() -> None:
        loan, sizes = borrow(engine, 1.0, 32), list[int]()
        for _ in range(3):
            back = await engine.borrower.shed(MODEL, 20 * PAGE)
            assert back is not None
            sizes.append(len(back.blocks) // PAGE)
        assert sizes == [20, 11, 0]
        assert loan.pool.available == PAGE

    serve(play(), engine, executor)


def test_what_is_kept_for_who_is_offloaded_is_a_part_of_what_is_left() -> None:
    engine, executor = hot_unit(24, 32)

    async def play() -> None:
        loan = borrow(engine, 1.0, 32)
        assert await engine.borrower.shed(MODEL, 30 * PAGE)
        assert loan.policy.roomy

    serve(play(), engine, executor)


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
