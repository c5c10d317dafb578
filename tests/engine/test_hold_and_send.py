"""The verb hold, with sends: what stands still is sent by the same order, before the next job begins."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from kvloom.types.errors import BadRequest
from kvloom.types.verbs import PrepRecv, RemoteSend
from tests.engine.readers import Reader
from tests.modelled import expected, turns
from tests.modelled_units import MODEL, Unit, generate, prompt, run, sending, units


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
