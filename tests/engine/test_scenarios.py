"""The whole engine over a modelled device, under whatever order of events: laws 1 to 5."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal, cast

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvloom.engine.batching import POLICIES
from kvloom.engine.engine import Engine
from kvloom.types.request import SamplingParams, StartGenerate
from kvloom.types.spec import Policy
from tests.engine.plays import MOST_JOBS, check, order, serve
from tests.engines import Answer
from tests.examples import examples
from tests.modelled import (
    CONTEXT,
    GEOMETRIES,
    VOCAB,
    ModelledExecutor,
    ask,
    engine_over,
    finish,
    modelled,
    turns,
)


@dataclass(frozen=True)
class Visit:
    """A request that comes after `wait` turns of the loop and, where `leaves` is set, leaves after `stay`."""

    body: StartGenerate
    wait: int
    leaves: Literal["abort", "hang up"] | None
    stay: int


@dataclass(frozen=True)
class Scenario:
    visits: list[Visit]
    blocks: int
    compute: int
    policy: Policy
    chunk_tokens: int
    max_running: int
    failing: frozenset[int]
    seed: int


@st.composite
def _visits(draw: st.DrawFn, number: int, blocks: int, hostile: bool) -> Visit:
    model = draw(st.sampled_from(sorted(GEOMETRIES)))
    geometry = GEOMETRIES[model]
    longest = min(CONTEXT, blocks // geometry.blocks_per_page * geometry.tokens_per_block)
    length = draw(st.integers(1, longest - 1))
    seed = draw(st.integers(0, 3))
    sampling = SamplingParams(
        max_tokens=draw(st.integers(1, min(24, longest - length))),
        seed=seed,
        temperature=draw(st.sampled_from([0.0, 1.0])),
        stop_token_ids=tuple(range(0, VOCAB, 20)) if draw(st.booleans()) else (),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
    )
    body = StartGenerate(
        model=model,
        request=f"r{number}",
        prompt=[(seed * 7 + i) % VOCAB for i in range(length)],
        sampling=sampling,
        n=draw(st.sampled_from([1, 1, 2, 4])),
        priority=draw(st.integers(0, 2)),
        interval=draw(st.sampled_from([1, 1, 5])),
    )
    leaves: Literal["abort", "hang up"] | None = None
    if hostile:
        leaves = draw(st.sampled_from([None, None, "abort", "hang up"]))
    return Visit(body, draw(st.sampled_from([0, 0, 1, 7, 40])), leaves, draw(st.integers(0, 150)))


@st.composite
def _scenarios(draw: st.DrawFn, *, hostile: bool) -> Scenario:
    blocks = draw(st.integers(24, 110))
    count = draw(st.integers(1, 9))
    return Scenario(
        visits=[draw(_visits(i, blocks, hostile)) for i in range(count)],
        blocks=blocks,
        compute=draw(st.sampled_from([1, 2, 3, 8])),
        policy=cast(Policy, draw(st.sampled_from(sorted(POLICIES)))),
        chunk_tokens=draw(st.sampled_from([1, 5, 16, 64])),
        max_running=draw(st.sampled_from([1, 2, 5, 16])),
        failing=draw(st.frozensets(st.integers(0, 60), max_size=4)) if hostile else frozenset(),
        seed=draw(st.integers(0, 99)),
    )


async def _visit(engine: Engine, visit: Visit) -> Answer:
    answer = Answer()
    stream = engine.start_generate(visit.body)

    async def read() -> None:
        async for frame in stream:
            answer.take(frame)

    reading = asyncio.ensure_future(read())
    if visit.leaves:
        for _ in range(visit.stay):
            if not reading.done():
                await turns(1)
        if visit.leaves == "abort":
            await engine.abort(visit.body.request)
        else:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await stream.aclose()
            return answer
    await reading
    assert len(answer.ends) == visit.body.n
    return answer


async def _play(scenario: Scenario) -> tuple[list[Answer], ModelledExecutor, int]:
    executor = ModelledExecutor(
        scenario.blocks, compute=scenario.compute, seed=scenario.seed, failing=scenario.failing
    )
    engine = engine_over(
        executor,
        policy=scenario.policy,
        chunk_tokens=scenario.chunk_tokens,
        max_running=scenario.max_running,
        rates={"wide": 5.0},
    )
    async with modelled(engine, executor):
        tasks: list[asyncio.Task[Answer]] = []
        for visit in scenario.visits:
            await turns(visit.wait)
            engine.pool.check()
            tasks.append(asyncio.create_task(_visit(engine, visit)))
        await finish(executor, tasks, most_jobs=MOST_JOBS)
        await turns()
        engine.pool.check()
        load = await engine.load()
        assert all(m.waiting == m.running == m.used_blocks == 0 for m in load.models.values())
        return (
            [task.result() for task in tasks],
            executor,
            sum(m.preemptions_total for m in load.models.values()),
        )


_SETTINGS = settings(
    max_examples=examples(60),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@_SETTINGS
@given(scenario=_scenarios(hostile=False))
def test_everyone_ends_with_the_tokens_of_a_lone_run(scenario: Scenario) -> None:
    answers, executor, preemptions = asyncio.run(_play(scenario))
    event("preempted" if preemptions else "not preempted")
    for visit, answer in zip(scenario.visits, answers, strict=True):
        check(executor, visit.body, answer, whole=True)


@_SETTINGS
@given(scenario=_scenarios(hostile=True))
def test_aborts_hang_ups_and_failed_jobs_touch_nobody_else(scenario: Scenario) -> None:
    answers, executor, _ = asyncio.run(_play(scenario))
    for visit, answer in zip(scenario.visits, answers, strict=True):
        reasons = {end.reason for end in answer.ends.values()}
        assert reasons <= {"length", "stop"} | ({"error"} if scenario.failing else set()) | (
            {"abort"} if visit.leaves else set()
        )
        for end in answer.ends.values():
            assert end.reason != "error" or "(Broken)" in end.message
        whole = visit.leaves is None and not reasons & {"abort", "error"}
        check(executor, visit.body, answer, whole=whole)


def test_a_run_replays_exactly() -> None:
    bodies = [order(f"r{i}", "wide", 20 + i, max_tokens=12) for i in range(6)]
    visits = [Visit(body, i, "abort" if i == 3 else None, 60) for i, body in enumerate(bodies)]
    scenario = Scenario(visits, 60, 3, "adbs", 8, 8, frozenset({9}), 5)
    runs = [asyncio.run(_play(scenario)) for _ in range(2)]
    assert runs[0][0] == runs[1][0]
    first, second = ([(j.model, j.phase, j.share, j.tokens.tolist()) for j in run[1].jobs] for run in runs)
    assert first == second


def test_a_prompt_that_was_preempted_is_told_when_it_begins_again() -> None:
    """An empty frame comes when it is let in, and one each time that it begins to be computed."""
    executor = ModelledExecutor(84, models=("wide",))
    engine, frames, preemptions = engine_over(executor), list[int](), list[int]()

    async def late() -> None:
        async for frame in engine.start_generate(order("late", "wide", 52, max_tokens=4, priority=5)):
            frames.append(len(frame))

    async def play() -> None:
        async with asyncio.TaskGroup() as tasks:
            for name in ("one", "another"):
                tasks.create_task(ask(engine, order(name, "wide", 13, max_tokens=12)))
            await turns(2)
            tasks.create_task(late())
        preemptions.append((await engine.load()).models["wide"].preemptions_total)

    serve(play(), engine, executor)
    assert preemptions == [1]
    assert frames[:4] == [0, 0, 0, 1]
