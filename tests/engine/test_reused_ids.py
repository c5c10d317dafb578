"""A request id used again: whatever the old request leaves behind does not reach the new one."""

from __future__ import annotations

import asyncio

from kvloom.types.request import Event, TokenEvent
from tests.engine.plays import order, serve, until, until_in_a_job
from tests.modelled import ModelledExecutor, ask, engine_over, expected, turns


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
