"""A cold unit whose own models wait for what is lent: it comes back when they have waited for a while."""

from __future__ import annotations

import asyncio

import pytest

from kvloom.engine.engine import Engine
from kvloom.offload.loans import SHORT
from kvloom.offload.terms import Borrow, HandBack
from kvloom.types.clock import Clock, WallClock
from kvloom.types.errors import Conflict, OutOfBlocks
from kvloom.types.verbs import PrepRecv
from tests.engine.modelled_weaving import MODEL, PAGE, ModelledBackend, hot_unit
from tests.engine.plays import check, order, serve
from tests.modelled import ModelledExecutor, ask, engine_over
from tests.modelled_units import ManualClock


def cold_unit(pages: int, clock: Clock | None = None, stuck: int = 0) -> tuple[Engine, ModelledExecutor]:
    executor = ModelledExecutor(pages * PAGE, compute=1, models=(MODEL,))
    backend = ModelledBackend(executor, stuck)
    return engine_over(executor, offload=backend, clock=clock or ManualClock()), executor


def terms(pages: int) -> Borrow:
    return hot_unit(24, 24)[0].borrower.terms(MODEL, pages)


async def answered(engine: Engine, executor: ModelledExecutor, count: int) -> None:
    """One after the other, because two of them need more than is left."""
    bodies = [order("a" * (i + 1), MODEL, 56, max_tokens=count) for i in range(2)]
    for body, answer in zip(bodies, await asyncio.gather(*(ask(engine, b) for b in bodies)), strict=True):
        check(executor, body, answer, whole=True)


@pytest.mark.parametrize(("count", "back"), [(SHORT - 8, False), (SHORT + 8, True)])
def test_a_wait_ends_a_loan_if_it_lasts(count: int, back: bool) -> None:
    """60 pages, of which 30 are lent."""
    engine, executor = cold_unit(60)

    async def play() -> None:
        engine.lender.lend(terms(30))
        await answered(engine, executor, count)
        assert (engine.pool.lent == 0) == back
        if back:
            with pytest.raises(OutOfBlocks, match="own models have needed the blocks"):
                engine.lender.lend(terms(30))

    serve(play(), engine, executor)


def test_short_waits_far_from_each_other_end_no_loan() -> None:
    engine, executor = cold_unit(60)

    async def play() -> None:
        engine.lender.lend(terms(30))
        for _ in range(8):
            await answered(engine, executor, 4)
            lone = order("b", MODEL, 8, max_tokens=2 * SHORT)
            check(executor, lone, await ask(engine, lone), whole=True)
        assert engine.pool.lent == 30 * PAGE

    serve(play(), engine, executor)


def test_where_nothing_runs_for_whose_end_to_wait_it_ends_at_once() -> None:
    """A reservation and the loan leave too little for a request that would run by itself."""
    engine, executor = cold_unit(40)

    async def play() -> None:
        engine.lender.lend(terms(16))
        await engine.prep_recv(PrepRecv(model=MODEL, request="peer", prompt=[1] * 40))
        body = order("a", MODEL, 90, max_tokens=4)
        check(executor, body, await ask(engine, body), whole=True)
        assert not engine.pool.lent
        await engine.abort("peer")

    serve(play(), engine, executor)


def test_a_unit_that_is_told_to_leave_has_back_what_it_lends_before_it_ends() -> None:
    """Its borrower is in the middle of a copy, several times."""
    engine, executor = cold_unit(60, WallClock(), stuck=4)

    async def play() -> None:
        engine.lender.lend(terms(30))

    serve(play(), engine, executor)
    assert not engine.pool.lent


@pytest.mark.parametrize("stuck", [0, 2])
def test_a_unit_that_takes_no_part_back_refuses_it(stuck: int) -> None:
    """Its device knows what is lent until the loan ends; or the whole loan is about to be back."""
    engine, executor = cold_unit(60, stuck=stuck)

    async def play() -> None:
        loan = engine.lender.lend(terms(30))
        if stuck:
            engine.lender.recall()
        why = "all of this loan is on its way back" if stuck else "takes a loan back as a whole"
        with pytest.raises(Conflict, match=why):
            await engine.take_back(HandBack(model=MODEL, ticket=loan.ticket, blocks=list(range(PAGE))))
        assert engine.pool.lent == 30 * PAGE
        engine.lender.recall()

    serve(play(), engine, executor)
