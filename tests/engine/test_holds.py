"""The verbs hold and resume: a running request stands still, is sent, and goes on here or elsewhere."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvloom.types.errors import BadRequest, Unavailable
from kvloom.types.job import Phase
from kvloom.types.request import EndEvent, Event, StartGenerate, TokenEvent
from kvloom.types.verbs import PrepRecv, RemoteSend
from tests.engine.plays import Reader
from tests.engines import Answer
from tests.modelled import ask, expected, turns
from tests.modelled_units import MODEL, Unit, generate, prompt, run, sending, units


async def send(source: Unit, target: Unit, tokens: list[int], end: int, request: str, stage: str) -> int:
    """tokens[:end] to the target, where they are cached then. Returns how many were computed for it."""
    spot = await target.engine.prep_recv(PrepRecv(model=MODEL, request=stage, prompt=tokens, end=end))
    computed = 0
    if spot.matched < spot.end:
        order = sending(tokens, spot, spot.matched, spot.end, request)
        computed = (await source.engine.remote_send(order)).computed
    await target.engine.abort(stage)
    return computed


@settings(max_examples=40)
@given(data=st.data())
def test_a_request_moves_while_it_runs(data: st.DataObject) -> None:
    """In stages, of which the first go while it decodes. Nothing of it is computed twice."""
    n, length = data.draw(st.sampled_from([1, 1, 3])), data.draw(st.integers(1, 40))
    first, then = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 6))

    async def test() -> None:
        async with units(2, seed=length, blocks=260) as (source, target):
            body = replace(generate(prompt(length), temperature=1.0, max_tokens=24), n=n)
            whole = expected(source.executor, body)
            reader = Reader(source, body)
            await reader.until(first)
            seen = {choice: tokens[:] for choice, tokens in reader.answer.tokens.items()}
            for choice, tokens in seen.items():
                context = body.prompt + tokens
                ready = (len(context) - 1) // 4 * 4
                if ready:
                    assert not await send(source, target, context, ready, "r", f"stage-{choice}")
            await reader.until(first + then)
            standing = await source.engine.hold("r")
            for made in standing.made:
                context = body.prompt + made.tokens
                spare = await send(source, target, context, len(context) - 1, "r", f"last-{made.choice}")
                assert not spare
            before, jobs = target.computed, len(target.executor.jobs)
            await source.engine.abort("r")
            await reader.task
            assert {end.reason for end in reader.answer.ends.values()} == {"abort"}
            for made in standing.made:  # the stream has told all that the answer says
                assert reader.answer.tokens[made.choice] == made.tokens
            rest = await ask_on(target, replace(body, request="r2", made=standing.made))
            assert rest.tokens == whole
            assert target.computed - before == sum(24 - len(made.tokens) for made in standing.made)
            assert {job.phase for job in target.executor.jobs[jobs:]} == {Phase.DECODE}

    run(test)


async def ask_on(unit: Unit, body: StartGenerate) -> Answer:
    reader = Reader(unit, body)
    await reader.task
    return reader.answer


@pytest.mark.parametrize("n", [1, 2])
def test_one_that_resumes_has_lost_nothing(n: int) -> None:
    async def test() -> None:
        async with units(1) as (unit,):
            body = replace(generate(prompt(13), temperature=1.0, max_tokens=20), n=n)
            reader = Reader(unit, body)
            await reader.until(5)
            standing = await unit.engine.hold("r")
            assert await unit.engine.hold("r") == standing
            other = generate(prompt(9, first=3), request="other")
            assert (await ask(unit.engine, other)).tokens == expected(unit.executor, other)
            await turns()
            assert reader.answer.tokens == {made.choice: made.tokens for made in standing.made}
            before = unit.computed
            await unit.engine.resume("r")
            await unit.engine.resume("r")
            await reader.task
            assert reader.answer.tokens == expected(unit.executor, body)
            assert unit.computed - before == sum(20 - len(made.tokens) for made in standing.made)

    run(test)


def test_one_that_nobody_resumes_goes_on_after_a_lease() -> None:
    async def test() -> None:
        async with units(1) as (unit,):
            reader = Reader(unit, generate(prompt(13), temperature=1.0, max_tokens=20))
            await reader.until(5)
            await unit.engine.hold("r")
            await unit.pass_time(29)
            assert not reader.task.done()
            await unit.pass_time(2)
            await reader.task
            assert reader.answer.tokens == expected(unit.executor, reader.body)

    run(test)


def test_a_resume_overtakes_no_hold_that_waits_for_the_step_under_way() -> None:
    async def test() -> None:
        async with units(1) as (unit,):
            reader = Reader(unit, generate(prompt(13), temperature=1.0, max_tokens=20))
            await reader.until(5)
            stream = unit.engine._requests.stream("r")
            while not (stream and stream.in_job):
                await turns(1)
            holding = asyncio.create_task(unit.engine.hold("r"))
            await asyncio.sleep(0)
            assert not holding.done()
            await unit.engine.resume("r")
            await reader.task
            assert reader.answer.tokens == expected(unit.executor, reader.body)
            assert (await holding).made

    run(test)


def test_what_cannot_be_held() -> None:
    async def test() -> None:
        async with units(1) as (unit,):
            with pytest.raises(BadRequest, match="no request nobody is here"):
                await unit.engine.hold("nobody")
            await unit.engine.resume("nobody")
            reader = Reader(unit, generate(prompt(90), max_tokens=3))
            await turns(2)
            with pytest.raises(BadRequest, match="without a token"):
                await unit.engine.hold("r")
            await reader.task
            assert reader.answer.tokens == expected(unit.executor, reader.body)
            with pytest.raises(BadRequest, match="no request r is here"):
                await unit.engine.hold("r")

    run(test)


@pytest.mark.parametrize("ends", ["abort", "hang up", "stop"])
def test_a_held_request_can_end_like_any_other(ends: str) -> None:
    """`units` looks that no block is left."""

    async def test() -> None:
        async with units(1) as (unit,):
            reader = Reader(unit, generate(prompt(13), max_tokens=20))
            await reader.until(3)
            await unit.engine.hold("r")
            if ends == "abort":
                await unit.engine.abort("r")
                await reader.task
            elif ends == "hang up":
                reader.task.cancel()
                await asyncio.gather(reader.task, return_exceptions=True)
            else:
                unit.engine.stop()
                with pytest.raises(Unavailable, match="stopping"):
                    await reader.task

    run(test)


def test_it_ends_in_the_step_after_which_it_was_to_stand_still() -> None:
    async def test() -> None:
        async with units(1) as (unit,):
            body = generate(prompt(5), max_tokens=2)
            frames = unit.engine.start_generate(body)
            events: list[Event] = []
            async with aclosing(frames):
                while not any(isinstance(event, TokenEvent) for event in events):
                    events += await anext(frames)
                holding = asyncio.create_task(unit.engine.hold("r"))
                while not any(isinstance(event, EndEvent) for event in events):
                    events += await anext(frames)
                with pytest.raises(BadRequest, match=r"has ended|no request"):
                    await holding

    run(test)


@pytest.mark.parametrize("ending", ["resume", "abort", "hang up"])
def test_what_stands_still_keeps_what_it_has_until_it_is_over(ending: str) -> None:
    """Nobody takes its blocks, however many are wanted; then they are as good as any."""

    async def test() -> None:
        async with units(1) as [unit]:
            engine, pool = unit.engine, unit.engine.pool
            reader = Reader(unit, generate(prompt(20), request="it", max_tokens=30))
            await reader.until(4)
            await engine.hold("it")
            kept = pool.total - pool.available
            assert kept > 0
            if ending == "resume":
                await engine.resume("it")
                await reader.task
            elif ending == "abort":
                await engine.abort("it")
            else:
                reader.task.cancel()
            await asyncio.wait([reader.task])
            await turns()
            assert pool.available == pool.total
            pool.check()

    run(test)


async def order(target: Unit, context: list[int], name: str, request: str = "r") -> RemoteSend:
    """Room at `target` for all of `context`, to be filled from where `request` runs."""
    body = PrepRecv(model=MODEL, request=name, prompt=context, end=len(context))
    spot = await target.engine.prep_recv(body)
    return sending(context, spot, spot.matched, spot.end, request)


@pytest.mark.parametrize("n", [1, 2])
def test_what_stands_still_is_sent_as_far_as_it_has_k_and_v(n: int) -> None:
    async def test() -> None:
        async with units(2) as (source, target):
            body = replace(generate(prompt(13), temperature=1.0, max_tokens=20), n=n)
            reader = Reader(source, body)
            await reader.until(5)
            contexts = {choice: [*body.prompt, *told] for choice, told in reader.answer.tokens.items()}
            sends = [await order(target, context, f"room-{choice}") for choice, context in contexts.items()]
            standing = await source.engine.hold("r", sends)
            assert standing.sent == [
                min(len(contexts[made.choice]), len(body.prompt) + len(made.tokens) - 1)
                for made in standing.made
            ]
            assert await source.engine.hold("r", sends) == standing
            await source.engine.abort("r")
            await reader.task
            before = target.computed
            rest = Reader(target, replace(body, request="room-0", made=standing.made))
            await rest.task
            assert rest.answer.tokens == expected(source.executor, body)
            grown = sum(20 - len(made.tokens) for made in standing.made)
            late = sum(
                len(body.prompt) + len(made.tokens) - 1 - end
                for made, end in zip(standing.made[:1], standing.sent, strict=False)
            )
            if n == 1:
                assert target.computed - before == grown + late
            await target.engine.abort("room-1")

    run(test)


def test_a_send_that_fails_leaves_it_standing() -> None:
    async def test() -> None:
        async with units(2) as (source, target):
            reader = Reader(source, generate(prompt(13), temperature=1.0, max_tokens=20))
            await reader.until(5)
            send = await order(target, [*prompt(13), *reader.answer.tokens[0]], "room")
            await target.engine.abort("room")
            with pytest.raises(BadRequest):
                await source.engine.hold("r", [send])
            told = len(reader.answer.tokens[0])
            await turns(20)
            assert len(reader.answer.tokens[0]) <= told + 1 < 20
            await source.engine.resume("r")
            await reader.task
            assert reader.answer.tokens == expected(source.executor, reader.body)

    run(test)


@pytest.mark.parametrize("n", [1, 2])
def test_whoever_waited_for_the_step_goes_on_before_the_next_one_begins(n: int) -> None:
    """So its copies do not wait for a core."""
    seen = []

    async def test() -> None:
        async with units(2) as (source, target):
            body = replace(generate(prompt(13), temperature=1.0, max_tokens=20), n=n)
            reader = Reader(source, body)
            other = Reader(source, generate(prompt(9, first=3), request="other", max_tokens=20))
            await reader.until(5)
            stream = source.engine._requests.stream("r")
            while not (stream and stream.in_job):
                await turns(1)
            contexts = [[*prompt(13), *tokens] for tokens in reader.answer.tokens.values()]
            sends = [await order(target, context, f"room-{i}") for i, context in enumerate(contexts)]
            while not stream.in_job:
                await turns(1)
            launch, claim = source.executor.launch, source.transport.claim

            def launched(*arguments: Any) -> Any:
                seen.append("job")
                return launch(*arguments)

            def claimed(*arguments: Any) -> Any:
                seen.append("send")
                return claim(*arguments)

            source.executor.launch = launched  # type: ignore[method-assign,assignment]
            source.transport.claim = claimed  # type: ignore[method-assign,assignment]
            await source.engine.hold("r", sends)
            await source.engine.abort("r")
            for i in range(n):
                await target.engine.abort(f"room-{i}")
            await asyncio.gather(reader.task, other.task)

    run(test)
    assert seen[:n] == ["send"] * n


def test_who_hangs_up_ends_the_send_and_not_the_standing() -> None:
    """`units` looks that no block is left."""

    async def test() -> None:
        async with units(2) as (source, target):
            reader = Reader(source, generate(prompt(60), temperature=1.0, max_tokens=20))
            await reader.until(5)
            send = await order(target, [*prompt(60), *reader.answer.tokens[0]], "room")
            begun, claim = asyncio.Event(), source.transport.claim

            def claiming(*arguments: Any) -> Any:
                begun.set()
                return claim(*arguments)

            source.transport.claim = claiming  # type: ignore[method-assign,assignment]
            holding = asyncio.create_task(source.engine.hold("r", [send]))
            await begun.wait()
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            await turns(20)
            assert not source.engine._transfers._open
            assert not reader.task.done()
            await target.engine.abort("room")
            await source.engine.resume("r")
            await reader.task
            assert reader.answer.tokens == expected(source.executor, reader.body)

    run(test)
