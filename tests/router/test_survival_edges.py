"""What a review has found at the edges of survival: gentle ends, aborts meanwhile, shorter contexts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from msgspec.structs import replace

from kvloom.router import Call, Fleet, Frames
from kvloom.router.program import Program
from kvloom.types.errors import KvloomError, QueueFull, Unavailable
from kvloom.types.request import EndEvent, Event, StartGenerate
from tests.router.fleets import Answer, Fleets, ask, ask_well, begin, body, routed, turns
from tests.router.ledger import said

TOKENS = 6


async def begun(fleets: Fleets, request: StartGenerate) -> tuple[Answer, asyncio.Task[None]]:
    """The first engine has said a token of it, and says no more before its gate is open."""
    answer = Answer()
    fleets.engines[0].gate.clear()

    async def reading() -> None:
        async for frame in fleets.router.start_generate(request):
            answer.take(frame)

    task = await begin(reading())
    assert answer.tokens
    return answer, task


async def test_a_pardon_for_a_broken_connection_outlasts_the_next_refusal() -> None:
    """It had let the request in, and would do so again; the other is full."""
    async with routed(2) as fleets:
        first, second = fleets.engines
        real, asked = first.start_generate, []

        async def breaking(request: StartGenerate) -> AsyncGenerator[list[Event], None]:
            asked.append("first")
            if len(asked) == 1:
                yield []
                raise Unavailable("connection reset by peer")
            async with aclosing(real(request)) as frames:
                async for frame in frames:
                    yield frame

        async def full(request: StartGenerate) -> AsyncGenerator[list[Event], None]:
            asked.append("second")
            raise QueueFull("4 requests wait already", retry_after=1)
            yield

        first.start_generate = breaking  # type: ignore[method-assign, assignment]
        second.start_generate = full  # type: ignore[method-assign, assignment]
        await ask_well(fleets.router, body())
        assert asked == ["first", "second", "first"]


async def test_an_engine_that_is_back_before_it_is_asked_goes_on() -> None:
    """Its connection broke, and that is all that anybody has seen."""
    async with routed(1) as fleets:
        [engine] = fleets.engines
        real, broken = engine.start_generate, False

        async def breaking(request: StartGenerate) -> AsyncGenerator[list[Event], None]:
            nonlocal broken
            async with aclosing(real(request)) as frames:
                async for frame in frames:
                    yield frame
                    if frame and not broken:
                        broken = True
                        raise Unavailable("the connection broke")

        engine.start_generate = breaking  # type: ignore[method-assign,assignment]
        await ask_well(fleets.router, body(20, tokens=TOKENS))


async def test_an_engine_that_stops_gently_loses_nothing() -> None:
    async with routed(1) as fleets:
        [engine] = fleets.engines
        real, load = engine.start_generate, engine.load
        stopping = True

        async def ending(request: StartGenerate) -> AsyncGenerator[list[Event], None]:
            async with aclosing(real(request)) as frames:
                yield await anext(frames)
                yield await anext(frames)
                if stopping:
                    yield [EndEvent(0, "error", message="the engine is stopping")]
                    return
                async for frame in frames:
                    yield frame

        async def loads() -> object:
            return replace(await load(), draining=stopping)

        engine.start_generate, engine.load = ending, loads  # type: ignore[method-assign,assignment]
        asking = await begin(ask_well(fleets.router, body(20, tokens=TOKENS)))
        assert not asking.done()
        assert fleets.router.services == {"a": "down"}
        stopping = False
        await fleets.clock.advance(10.0)
        await asking


async def test_a_shorter_context_does_not_cut_an_answer_short() -> None:
    """It waits for the unit that has promised all of it."""
    async with routed(2) as fleets:
        first, second = fleets.engines
        unit = fleets.router.units[second.name]
        for replica in unit.replicas.values():
            replica.card = replace(replica.card, context_length=22)
        answer, task = await begun(fleets, request := body(20, tokens=TOKENS))
        first.down = True
        first.gate.set()
        await turns()
        assert not task.done()
        first.down = False
        await fleets.clock.advance(10.0)
        await task
        assert answer.tokens == {0: [said(request.prompt, 0, at) for at in range(TOKENS)]}


@pytest.mark.parametrize("choice", [None, 0])
async def test_an_abort_does_not_wait_for_a_restart(choice: int | None) -> None:
    """All of the request, or its last choice."""
    async with routed(1) as fleets:
        [engine] = fleets.engines
        answer, task = await begun(fleets, request := body(20, tokens=TOKENS))
        engine.down = True
        engine.gate.set()
        await turns()
        await fleets.router.abort(request.request, choice)
        await turns()
        await task
        assert answer.ends == {0: EndEvent(0, "abort")}


async def test_a_choice_that_is_aborted_between_two_verbs_says_nothing() -> None:
    async def slow(call: Call, fleet: Fleet) -> Frames:
        await call.prep_recv(fleet.up[0], end=-1)
        await call.abort(1)
        async for frame in call.start_generate(fleet.up[0]):
            yield frame

    async with routed(1, Program("slow", slow, {})) as fleets:
        answer = await ask(fleets.router, request := body(20, n=2, tokens=TOKENS))
        assert answer.tokens == {0: [said(request.prompt, 0, at) for at in range(TOKENS)]}
        assert {choice: end.reason for choice, end in answer.ends.items()} == {0: "length", 1: "abort"}


async def test_the_prompts_report_comes_though_a_choice_has_ended_before_it() -> None:
    async with routed(2) as fleets:
        first = fleets.engines[0]
        first.answering.clear()
        request, answer = body(20, n=2, tokens=TOKENS, prompt_logprobs=0), Answer()

        async def reading() -> None:
            async for frame in fleets.router.start_generate(request):
                answer.take(frame)

        real = first.start_generate

        async def ends_one(asked: StartGenerate) -> AsyncGenerator[list[Event], None]:
            async with aclosing(real(asked)) as frames:
                yield await anext(frames)
                yield [EndEvent(1, "abort")]
                first.down = True
                raise Unavailable("the connection broke")

        first.start_generate = ends_one  # type: ignore[method-assign,assignment]
        await reading()
        assert answer.prompt is not None
        assert answer.tokens == {0: [said(request.prompt, 0, at) for at in range(TOKENS)]}


async def test_a_program_that_ends_early_is_an_error() -> None:
    async def hasty(call: Call, fleet: Fleet) -> Frames:
        async with aclosing(call.start_generate(fleet.up[0])) as frames:
            yield await anext(frames)
            yield await anext(frames)

    async with routed(1, Program("hasty", hasty, {})) as fleets:
        with pytest.raises(KvloomError, match="hasty ended"):
            await ask(fleets.router, body(20, tokens=TOKENS))
