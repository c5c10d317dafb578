"""Requests, choices and engines that end early; and ids that are used again, whose new request nothing of the
old one reaches."""

from __future__ import annotations

import asyncio

import pytest

from kvloom.types.errors import Unavailable
from kvloom.types.request import Event, TokenEvent
from tests.engine.plays import order, serve, until, until_in_a_job
from tests.modelled import ModelledExecutor, ask, engine_over, expected, turns


def test_an_abort_frees_the_blocks_with_the_job_that_runs() -> None:
    executor = ModelledExecutor(100)
    engine = engine_over(executor, chunk_tokens=8)

    async def play() -> None:
        for hangs_up in (False, True):
            stream = engine.start_generate(order("r", "wide", 60, n=2))
            await anext(stream)
            before = len(executor.jobs)
            await until_in_a_job(executor, before + 2)
            running = len(executor.jobs)
            assert engine.pool.available < engine.pool.total
            if hangs_up:
                await stream.aclose()
            else:
                await engine.abort("r")
            await until(lambda: executor.idle == executor.compute)
            await turns(3)
            assert engine.pool.available == engine.pool.total
            assert len(executor.jobs) == running
            await stream.aclose()

    serve(play(), engine, executor)


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("gone", [{0}, {1}, {0, 2}])
def test_one_choice_given_up_leaves_the_others(gone: set[int], after: int) -> None:
    """Whether their prompt waits still, is being computed, or has a second part to come."""
    executor = ModelledExecutor(100)
    engine = engine_over(executor, chunk_tokens=16)

    async def play() -> None:
        body = order("r", "wide", 20, n=4)
        asking = asyncio.create_task(ask(engine, body))
        await turns(2)
        if after:
            await until_in_a_job(executor, after)
        for choice in gone:
            await engine.abort("r", choice)
        answer, whole = await asking, expected(executor, body)
        for choice, tokens in whole.items():
            reason = answer.ends[choice].reason
            assert (reason, answer.tokens.get(choice, [])) == (
                ("abort", []) if choice in gone else ("length", tokens)
            )

    serve(play(), engine, executor)


def test_stop_ends_every_stream_and_waits_for_the_job() -> None:
    executor = ModelledExecutor(100)
    engine = engine_over(executor)

    async def play() -> None:
        asking = asyncio.create_task(ask(engine, order("r", "wide", 40, n=3)))
        await until_in_a_job(executor)
        engine.stop()
        with pytest.raises(Unavailable, match="the engine is stopping"):
            await asking

    serve(play(), engine, executor)


def test_an_id_used_again_while_the_old_job_runs() -> None:
    """Neither the old job's prompt report nor its failure reaches the new request of the same id."""
    executor = ModelledExecutor(100, failing={1})
    engine = engine_over(executor)

    async def play() -> None:
        for number in range(2):
            old = engine.start_generate(order("same", "wide", 8, prompt_logprobs=0))
            await anext(old)
            await until_in_a_job(executor, number + 1)
            await engine.abort("same")
            body = order("same", "wide", 30)
            answer = await ask(engine, body)
            assert answer.prompt is None
            if number == 0:
                assert answer.ends[0].reason == "error"  # its own first job was told to fail
            else:
                assert answer.tokens == expected(executor, body)
            await old.aclose()

    serve(play(), engine, executor)


def test_a_failed_job_of_an_old_request_spares_the_new_one_of_its_id() -> None:
    executor = ModelledExecutor(100, failing={0})
    engine = engine_over(executor)

    async def play() -> None:
        old = engine.start_generate(order("same", "wide", 8))
        await anext(old)
        await until_in_a_job(executor)
        await engine.abort("same")
        body = order("same", "wide", 30)
        assert (await ask(engine, body)).tokens == expected(executor, body)
        await old.aclose()

    serve(play(), engine, executor)


def test_a_slow_reader_of_an_ended_request_does_not_end_its_successor() -> None:
    executor = ModelledExecutor(100)
    engine = engine_over(executor)

    async def play() -> None:
        slow = engine.start_generate(order("same", "wide", 8))
        await anext(slow)
        await until_in_a_job(executor)
        await until(lambda: engine.pool.available == engine.pool.total)
        body = order("same", "wide", 30, max_tokens=40)
        new = asyncio.create_task(ask(engine, body))
        await turns(5)
        events: list[Event] = [event async for frame in slow for event in frame]
        assert sum(isinstance(event, TokenEvent) for event in events) == 8
        assert (await new).tokens == expected(executor, body)

    serve(play(), engine, executor)
