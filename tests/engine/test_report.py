"""What an engine reports of its load is what its requests hold and still need."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import numpy as np
import pytest

from kvloom.engine.engine import Engine
from kvloom.engine.freeness import freeness
from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.report import model_load
from kvloom.engine.sequence import Sequence as EngineSequence
from kvloom.engine.sequence import TokenBuffer
from kvloom.kv.pool import Pool
from kvloom.types.load import UnitLoad
from kvloom.types.request import Level, SamplingParams, StartGenerate
from kvloom.types.spec import Slo
from tests.modelled import CONTEXT, GEOMETRIES, ModelledExecutor, ask, card, engine_over, modelled, turns
from tests.modelled_units import ManualClock

WIDE = GEOMETRIES["wide"]  # 4 tokens a page of 4 blocks
LEVELS = (Level(-1, 8), Level(-5, 32))


def order(number: int, length: int, *, priority: int = 0, tokens: int = 40) -> StartGenerate:
    """Prompts of two numbers have nothing in common."""
    return StartGenerate(
        model="wide",
        request=f"r{number}",
        prompt=[number] * length,
        priority=priority,
        sampling=SamplingParams(max_tokens=tokens, seed=1),
    )


async def begin(engine: Engine, orders: Sequence[StartGenerate]) -> list[asyncio.Task[object]]:
    """In this order."""
    tasks: list[asyncio.Task[object]] = []
    for one in orders:
        tasks.append(asyncio.create_task(ask(engine, one)))
        await turns(1)
    return tasks


async def end(tasks: Sequence[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task


def run_with(
    orders: Sequence[StartGenerate], seen: list[UnitLoad], *, running: int = 2, polls: int = 60
) -> None:
    async def main() -> None:
        executor = ModelledExecutor(400, models=["wide"])
        engine = engine_over(executor, max_running=running, chunk_tokens=8, priorities=LEVELS)
        async with modelled(engine, executor):
            tasks = await begin(engine, orders)
            for _ in range(polls):
                await turns(1)
                seen.append(await engine.load())
            await end(tasks)
        seen.append(await engine.load())

    asyncio.run(main())


def test_an_engine_is_told_from_the_next_one_by_when_it_began() -> None:
    clock = ManualClock()
    first = engine_over(ModelledExecutor(400, models=["wide"]), clock=clock)
    clock.time = 7.0
    second = engine_over(ModelledExecutor(400, models=["wide"]), clock=clock)
    clock.time = 9.0
    assert [engine.load_now().began for engine in (first, second)] == [0.0, 7.0]


def test_a_begun_prompt_counts_whole() -> None:
    """Chunk by chunk its blocks come to be held; together with those to come they are always the prompt's."""
    seen: list[UnitLoad] = []
    run_with([order(1, 37)], seen, polls=25)
    loads = [load.models["wide"] for load in seen if load.running]
    begun = [load for load in loads if load.begun_blocks]
    assert {load.used_blocks + load.begun_blocks for load in begun} == {WIDE.blocks(37)}
    assert len({load.begun_blocks for load in begun}) > 2
    assert loads[-1].begun_blocks == 0
    assert freeness(seen[-2]) == (400 - loads[-1].used_blocks) / 1.0  # a token takes one block


def test_who_waits_is_told_apart_by_who_is_first() -> None:
    seen: list[UnitLoad] = []
    lengths = [5, 9, 21, 30]
    run_with([order(number, length) for number, length in enumerate(lengths, 1)], seen)
    loads = [load.models["wide"] for load in seen]
    both = [load for load in loads if load.waiting == 2]
    assert {(load.head_blocks, load.waiting_blocks) for load in both} == {
        (WIDE.blocks(21), WIDE.blocks(21) + WIDE.blocks(30))
    }
    assert all((load.waiting > 0) == (load.head_blocks > 0) for load in loads)
    assert {(load.page_blocks, load.page_tokens) for load in loads} == {(4, 4)}


@pytest.mark.parametrize(
    ("priorities", "told"),
    [((0, 0), {}), ((-1, 0), {-1: 1}), ((-1, -4), {-1: 2}), ((-5, -99), {-5: 2}), ((-5, -2), {-5: 1, -1: 1})],
)
def test_levels_tell_who_runs(priorities: tuple[int, ...], told: dict[int, int]) -> None:
    seen: list[UnitLoad] = []
    run_with([order(number, 6, priority=one) for number, one in enumerate(priorities, 1)], seen, polls=20)
    unit = next(load for load in reversed(seen) if load.running == 2)
    assert unit.priorities == LEVELS
    load = unit.models["wide"]
    assert {level.priority: level.running for level in load.levels} == told
    assert all(level.headroom == {-1: 8, -5: 32}[level.priority] for level in load.levels)


def test_who_stops_drains() -> None:
    seen: list[UnitLoad] = []
    run_with([order(1, 6)], seen, polls=4)
    assert [load.draining for load in seen] == [False] * 4 + [True]


def test_who_waits_longest_is_told_since_it_came_or_was_put_back() -> None:
    """One that was put back has run meanwhile, so it does not wait since it came."""
    clock = ManualClock()
    pool = Pool(40, {"wide": WIDE}, max_sequences=8, max_tokens={"wide": CONTEXT})
    queue = ModelQueue(card("wide"), pool.caches["wide"], 8, 8, slo=Slo(ttft=3.0, tpot=0.5), clock=clock)

    def oldest() -> float:
        return model_load(queue, ()).oldest_wait

    def sequence(number: int) -> EngineSequence:
        tokens, sampling = TokenBuffer(np.full(5, number)), SamplingParams(max_tokens=4, seed=1)
        return EngineSequence(number, "wide", f"r{number}", 0, (0, number, 0), sampling, tokens, [])

    first, second = sequence(1), sequence(2)
    assert oldest() == 0.0
    queue.enqueue(first, 0)
    clock.time = 2.0
    queue.enqueue(second, 0)
    clock.time = 5.0
    assert oldest() == 5.0
    queue.admit(first)
    assert oldest() == 3.0
    queue.admit(second)
    assert oldest() == 0.0
    queue.put_back(first, 1, "a test")
    clock.time = 6.0
    assert oldest() == 1.0
    assert model_load(queue, ()).slo == Slo(ttft=3.0, tpot=0.5)
