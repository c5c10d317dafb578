"""Streams that nobody reads: they hold no blocks that others want, and lose nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from msgspec.structs import replace

from kvloom.engine.engine import Engine
from kvloom.engine.requests import MOST_UNREAD
from kvloom.types.request import Event, StartGenerate
from kvloom.types.verbs import Prefix
from tests.engine.plays import check, order, serve, until
from tests.engine.real_fleet import Fleet, spec
from tests.engines import Answer, running
from tests.engines import body as asked
from tests.modelled import ModelledExecutor, ask, engine_over, turns

MODEL, CONTEXT = "thin", 1200  # a block a page, of two tokens


class Reader:
    """A caller that reads when it is told to."""

    def __init__(self, engine: Engine, body: StartGenerate) -> None:
        self.body = body
        self.answer = Answer()
        self._frames: AsyncGenerator[list[Event], None] = engine.start_generate(body)

    async def read(self, frames: int) -> None:
        for _ in range(frames):
            self.answer.take(await anext(self._frames))

    async def read_all(self) -> None:
        async for frame in self._frames:
            self.answer.take(frame)

    async def hang_up(self) -> None:
        await self._frames.aclose()


def unit(blocks: int) -> tuple[ModelledExecutor, Engine]:
    executor = ModelledExecutor(blocks, models=(MODEL,), context=CONTEXT)
    return executor, engine_over(executor, max_running=8)


async def stands_still(executor: ModelledExecutor) -> None:
    """Until no job runs any more."""
    jobs = -1
    while jobs < len(executor.jobs):
        jobs = len(executor.jobs)
        await turns(15)  # a job takes fewer


async def unread(executor: ModelledExecutor, engine: Engine, body: StartGenerate) -> Reader:
    """A caller that has read two frames, and whose stream stands still."""
    reader = Reader(engine, body)
    await reader.read(2)
    await stands_still(executor)
    return reader


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("interval", [1, 16])
def test_an_unread_stream_stands_still_and_goes_on_when_it_is_read(n: int, interval: int) -> None:
    """Its blocks are there for others, and its answer is the same (law 2)."""
    executor, engine = unit(1800)
    body = order("unread", MODEL, 20, n=n, max_tokens=1000 // n)
    body = replace(body, interval=interval)
    other = order("other", MODEL, 20, n=5, max_tokens=700)

    async def play() -> None:
        reader = await unread(executor, engine, body)
        made, load = len(executor.jobs), (await engine.load()).models[MODEL]
        assert made <= (MOST_UNREAD + 2 * interval * n) // n + 4
        assert (load.used_blocks, load.running, load.waiting) == (0, 0, 0)
        assert load.unread_total == n
        assert load.unread_blocks_total >= load.cached_blocks > 0
        assert n > 1 or load.unread_blocks_total == load.cached_blocks
        check(executor, other, await ask(engine, other), whole=True)  # needs all blocks
        assert len(executor.jobs) == made + 700 + 1
        await reader.read_all()
        check(executor, body, reader.answer, whole=True)

    serve(play(), engine, executor)


def test_what_is_cached_of_an_unread_stream_is_not_computed_again() -> None:
    executor, engine = unit(1800)
    body = order("unread", MODEL, 20, max_tokens=1000)

    async def play() -> None:
        reader = await unread(executor, engine, body)
        await reader.read_all()
        check(executor, body, reader.answer, whole=True)
        assert sum(job.tokens.size for job in executor.jobs) == 20 + 1000 - 1

    serve(play(), engine, executor)


def test_a_caller_who_reads_now_and_then() -> None:
    executor, engine = unit(1800)
    body = order("slow", MODEL, 20, n=2, max_tokens=900)

    async def play() -> None:
        reader = Reader(engine, body)
        while len(reader.answer.ends) < body.n:
            await reader.read(1)
            await stands_still(executor)
        await reader.read_all()
        check(executor, body, reader.answer, whole=True)

    serve(play(), engine, executor)


def test_an_unread_stream_can_end_otherwise() -> None:
    executor, engine = unit(1800)
    bodies = [order(f"unread-{i}", MODEL, 20, max_tokens=1000) for i in range(3)]

    async def play() -> None:
        readers = [await unread(executor, engine, body) for body in bodies]
        await readers[0].hang_up()
        await engine.abort(bodies[1].request)
        await readers[1].read_all()
        assert readers[1].answer.ends[0].reason == "abort"
        check(executor, bodies[1], readers[1].answer, whole=False)
        assert len(readers[1].answer.tokens[0]) > MOST_UNREAD  # what was made is told

    serve(play(), engine, executor)  # which ends the last one


def test_an_unread_stream_is_held_for_a_move_and_resumed() -> None:
    executor, engine = unit(1800)
    body = order("unread", MODEL, 20, max_tokens=1000)

    async def play() -> None:
        reader = await unread(executor, engine, body)
        made = (await engine.hold(body.request)).made[0].tokens
        await reader.read(1)
        assert reader.answer.tokens[0] == made
        jobs = len(executor.jobs)
        await stands_still(executor)
        assert len(executor.jobs) == jobs  # it was read, and is still held
        await engine.resume(body.request)
        await reader.read_all()
        check(executor, body, reader.answer, whole=True)

    serve(play(), engine, executor)


def test_a_caller_who_waits_for_a_long_frame_reads() -> None:
    executor, engine = unit(1800)
    body = order("whole", MODEL, 20, max_tokens=1000)
    body = replace(body, interval=1024)

    async def play() -> None:
        reader = Reader(engine, body)
        await reader.read(2)
        reading = asyncio.create_task(reader.read_all())
        await until(reading.done)
        check(executor, body, reader.answer, whole=True)

    serve(play(), engine, executor)


def test_real_models_make_the_same_tokens_after_a_stand_still(fleet: Fleet) -> None:
    """What was cached is dropped meanwhile, so that K and V are computed again (law 2)."""
    unread = asked("wide", [9, 8, 7, 6, 5, 4, 3, 2], n=4, max_tokens=120)
    other = asked("wide", [3, 1, 4, 1, 5], n=4, max_tokens=120)

    async def play() -> tuple[Answer, Answer]:
        async with running(spec(fleet)) as engine:
            reader = Reader(engine, unread)
            await reader.read(2)
            jobs = -1
            while jobs < (load := (await engine.load()).models["wide"]).decode_jobs_total or load.running:
                jobs = load.decode_jobs_total
                await turns(1)
            assert not reader.answer.ends
            assert load.output_tokens_total < 4 * 120
            others = await ask(engine, other)
            await engine.evict(Prefix(model="wide", prompt=unread.prompt))
            await reader.read_all()
            return reader.answer, others

    for body, answer in zip((unread, other), asyncio.run(play()), strict=True):
        for choice in range(4):
            fleet.oracles["wide"].check_at_once(body.prompt, answer.tokens[choice])
