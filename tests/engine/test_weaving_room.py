"""A loan without much room: who goes out, who has to come back, and what that costs the others."""

from __future__ import annotations

import asyncio

import pytest

from kvloom.engine.engine import Engine
from kvloom.engine.sequence import Sequence
from kvloom.offload.policy import COPIED, KEPT
from kvloom.types.job import Job
from kvloom.types.request import StartGenerate
from kvloom.types.verbs import PrepRecv
from tests.engine.modelled_weaving import MODEL, PAGE, ModelledBackend, WeavingExecutor, borrow, hot_unit
from tests.engine.plays import check, order, serve, until
from tests.modelled import ModelledExecutor, ask, engine_over, modelled
from tests.modelled_units import sending
from tests.plane import Plane


async def answered(engine: Engine, executor: WeavingExecutor, bodies: list[StartGenerate]) -> None:
    answers = await asyncio.gather(*(ask(engine, body) for body in bodies))
    for body, answer in zip(bodies, answers, strict=True):
        check(executor, body, answer, whole=True)


def test_a_full_loan_is_not_gone_out_into_again_and_again() -> None:
    """Sixteen want to be there, and there is room for a third of what they come to have. Of what is kept for
    those away nothing is taken by who goes."""
    engine, executor = hot_unit(300, 120)
    left: list[int] = []

    async def play() -> None:
        woven = borrow(engine, 1.0, 120)
        real = woven.finish

        def finish(job: Job, lost: str | None) -> tuple[set[int], list[Sequence]]:
            if any(out for _, out in woven._moving):
                left.append(woven.cache.pages.available)
            return real(job, lost)

        woven.finish = finish  # type: ignore[method-assign]
        await answered(engine, executor, [order("r" * i, MODEL, 16 + i, max_tokens=70) for i in range(1, 17)])
        assert woven.tokens > 400
        assert woven.went < 24

    serve(play(), engine, executor)
    assert min(left) >= 120 // KEPT


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_those_that_move_do_so_a_few_at_a_time(share: float) -> None:
    """Sixteen are sent away at once, or called back."""
    engine, executor = hot_unit(200, 200)

    async def play() -> None:
        woven = borrow(engine, 1 - share, 200)
        bodies = [order(f"r{i}", MODEL, 17, max_tokens=70) for i in range(16)]
        asked = asyncio.create_task(answered(engine, executor, bodies))
        await until(lambda: woven.tokens > 150 if woven.share else len(executor.jobs) > 20)
        before = woven.count
        engine.borrower.set_share(MODEL, share)
        await until(lambda: woven.count in (0, 16) and woven.count != before)
        await asked

    serve(play(), engine, executor)
    many = [(pages, moves) for pages, moves in executor.moved if len(moves) > 1]
    assert many
    assert all(sum(moves) <= pages // COPIED for pages, moves in many)


def test_a_prompt_stays_cached_at_home_when_its_sequence_goes() -> None:
    engine, executor = hot_unit(60, 60)

    async def play() -> None:
        borrow(engine, 1.0, 60)
        body = order("first", MODEL, 41, max_tokens=10)
        await answered(engine, executor, [body])
        again = await ask(engine, order("later", MODEL, 41, max_tokens=10))
        assert again.ends[0].cached_tokens == 40

    serve(play(), engine, executor)


def test_what_is_lost_is_computed_again_from_what_is_cached_at_home() -> None:
    engine, executor = hot_unit(60, 60, losing=frozenset([8]))

    async def play() -> None:
        borrow(engine, 1.0, 60)
        await answered(engine, executor, [order("lost", MODEL, 48, max_tokens=20)])
        assert engine.borrower.loan(MODEL) is None

    serve(play(), engine, executor)
    computed = sum(job.tokens.size for job in executor.jobs if job.offloaded is None)
    assert computed < 48 + 20 + 8  # not the prompt again


def test_who_comes_home_is_copied_from_where_the_cache_ends() -> None:
    engine, executor = hot_unit(60, 60)

    async def play() -> None:
        woven = borrow(engine, 1.0, 60)
        body = order("back", MODEL, 48, max_tokens=20)
        asked = asyncio.create_task(answered(engine, executor, [body]))
        await until(lambda: woven.tokens > 5)
        engine.borrower.set_share(MODEL, 0.0)
        await asked
        assert woven.came == 1

    serve(play(), engine, executor)
    out, back = (moves[0] for _, moves in executor.moved if moves)
    assert out >= 12
    assert back <= 3


@pytest.mark.parametrize("failing", [11, 15, 24])
def test_a_step_that_fails_takes_those_that_wait_with_it_to_nobody(failing: int) -> None:
    """All need another page at once, so some have to come home, and wait: they are computed again."""
    engine, executor = hot_unit(200, 30, failing=frozenset([failing]))

    async def play() -> None:
        borrow(engine, 1.0, 30)
        bodies = [order("r" * (i + 1), MODEL, 2, max_tokens=50) for i in range(8)]
        answers = await asyncio.gather(*(ask(engine, body) for body in bodies))
        failed = [any(end.reason == "error" for end in answer.ends.values()) for answer in answers]
        assert 0 < sum(failed) < len(bodies)
        for body, answer, lost in zip(bodies, answers, failed, strict=True):
            check(executor, body, answer, whole=not lost)

    serve(play(), engine, executor)


def test_who_lacks_room_at_home_goes_where_there_is_some() -> None:
    """Nobody is to be away by its number; nobody is computed again."""
    engine, executor = hot_unit(30, 60)

    async def play() -> None:
        woven = borrow(engine, 1e-9, 60)
        await answered(engine, executor, [order("r" * (i + 1), MODEL, 20, max_tokens=50) for i in range(3)])
        assert woven.went > 0
        assert (await engine.load()).models[MODEL].preemptions_total == 0

    serve(play(), engine, executor)


def test_an_offloaded_sequence_is_in_the_loans_cache_alone() -> None:
    engine, executor = hot_unit(60, 60)

    async def play() -> None:
        loan = borrow(engine, 1.0, 60)
        asked = asyncio.create_task(answered(engine, executor, [order("one", MODEL, 20, max_tokens=30)]))
        await until(lambda: loan.tokens > 5)
        assert len(loan.cache.sequences) == 1
        assert engine.pool.caches[MODEL].sequences == ()
        await asked

    serve(play(), engine, executor)


def test_the_prompt_of_an_offloaded_request_can_be_sent() -> None:
    """The verb caches what the request has at home first; it has nothing there."""
    plane, other = Plane(), ModelledExecutor(60 * PAGE, compute=1, models=(MODEL,))
    executor = WeavingExecutor(60 * PAGE, 60 * PAGE)
    hot = engine_over(executor, plane.join("hot", executor), offload=ModelledBackend(executor))
    target = engine_over(other, plane.join("target", other))
    body = order("one", MODEL, 20, max_tokens=30)

    async def play() -> None:
        async with modelled(target, other):
            loan = borrow(hot, 1.0, 60)
            asked = asyncio.create_task(answered(hot, executor, [body]))
            await until(lambda: loan.tokens > 5)
            room = await target.prep_recv(
                PrepRecv(model=MODEL, request="room", prompt=body.prompt, end=len(body.prompt))
            )
            sent = await hot.remote_send(sending(body.prompt, room, 0, room.end, body.request))
            assert sent.cached + sent.computed == room.end == len(body.prompt)
            await target.abort("room")
            await asked

    serve(play(), hot, executor)
