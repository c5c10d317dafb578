"""Batching at work: how long whoever waits must wait (law 5), and which jobs run together."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable
from types import FrameType

import pytest

from kvloom.engine.batching import POLICIES
from kvloom.engine.batching.view import STARVING
from kvloom.engine.engine import Engine
from kvloom.types.job import Phase
from kvloom.types.request import SamplingParams, StartGenerate
from kvloom.types.spec import Policy, Quotas
from tests.engine.plays import serve
from tests.engine.views import COMPUTE
from tests.engines import Answer
from tests.modelled import (
    GEOMETRIES,
    VOCAB,
    ModelledExecutor,
    ask,
    engine_over,
    expected,
    finish,
    modelled,
    turns,
)
from tests.modelled_units import ManualClock

_NUMBERS = itertools.count()


def order(name: str, length: int, tokens: int, *, priority: int = 0) -> StartGenerate:
    number = next(_NUMBERS)
    return StartGenerate(
        model=name,
        request=f"r{number}",
        prompt=[number % VOCAB] * length,
        priority=priority,
        sampling=SamplingParams(max_tokens=tokens, seed=1),
    )


def under_load(
    policy: Policy,
    compute: int,
    one: StartGenerate,
    load: Callable[[], StartGenerate],
    *,
    clients: int = 8,
    most_jobs: int,
    rates: dict[str, float] | None = None,
    chunk_tokens: int = 16,
    blocks: int = 110,
) -> int:
    """Jobs between the coming of `one` and its end, while `clients` send one after the other without end."""
    executor = ModelledExecutor(blocks, compute=compute)
    engine = engine_over(executor, policy=policy, chunk_tokens=chunk_tokens, rates=rates)

    async def client(engine: Engine) -> None:
        while True:
            await ask(engine, load())

    async def whole() -> int:
        async with modelled(engine, executor):
            crowd = [asyncio.create_task(client(engine)) for _ in range(clients)]
            for _ in range(2000):
                if engine.pool.free > blocks // 5:
                    await turns(1)
            came = len(executor.jobs)
            asking: asyncio.Task[Answer] = asyncio.create_task(ask(engine, one))
            try:
                await finish(executor, [asking], most_jobs=came + most_jobs)
            finally:
                for task in crowd:
                    task.cancel()
            assert asking.result().tokens == expected(executor, one)
            return len(executor.jobs) - came

    return asyncio.run(whole())


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_model_with_a_free_share_is_served_at_once(policy: Policy, compute: int) -> None:
    """Its prompt fits its quota: adbs makes room within a few jobs, the others within one generation."""
    one = order("tall", 20, 4)
    jobs = under_load(policy, compute, one, lambda: order("wide", 20, 20), most_jobs=1000)
    print(f"{policy} on {compute}: {jobs} jobs")
    assert jobs <= (30 if policy == "adbs" else 250)


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_prompt_beyond_its_quota_ends_under_an_endless_load(policy: Policy, compute: int) -> None:
    one = order("tall", 88, 4)  # 90 of 110 blocks
    rates = {"wide": 50.0}
    for chunk in (4, 64):
        jobs = under_load(
            policy,
            compute,
            one,
            lambda: order("wide", 9, 12),
            most_jobs=2000,
            rates=rates,
            chunk_tokens=chunk,
        )
        print(f"{policy} on {compute}, chunks of {chunk}: {jobs} jobs")
        assert jobs <= 8 * STARVING


# fcfs serves the whole unit by priority
@pytest.mark.parametrize("policy", ["adbs", "round-robin", "partitioned", "slack"])
def test_priorities_order_a_model_but_do_not_starve_another(policy: Policy) -> None:
    one = order("tall", 40, 4, priority=9)
    assert under_load(policy, 2, one, lambda: order("wide", 9, 12), most_jobs=1000) <= 8 * STARVING


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_request_beyond_a_fixed_quota_is_computed_once(policy: Policy) -> None:
    """Where it outgrows its quota a last chunk of one token is left, so that it would come no further if it
    gave way to itself with each step."""
    executor = ModelledExecutor(120, compute=1)
    engine = engine_over(executor, policy=policy, quotas="fixed", chunk_tokens=16)
    body = order("wide", 45, 8)

    async def play() -> None:
        load = engine.load_now().models["wide"]
        assert executor.geometries["wide"].blocks(45 + 8) > load.quota_blocks
        asking = asyncio.create_task(ask(engine, body))
        await finish(executor, [asking], most_jobs=20)
        assert asking.result().tokens == expected(executor, body)
        assert engine.load_now().models["wide"].preemptions_total == 0

    serve(play(), engine, executor)


@pytest.mark.parametrize(("policy", "again"), [("vllm-2023", 0), ("fcfs", 1)])
def test_what_gave_way_is_computed_again_in_full_as_published(policy: Policy, again: int) -> None:
    """Nothing is left in the cache of what gave way; kvloom's own finds it there while nobody needs it."""
    executor = ModelledExecutor(44, compute=1)
    engine = engine_over(executor, policy=policy)

    async def play() -> None:
        first, second = order("wide", 17, 14), order("wide", 17, 14)
        answers = await asyncio.gather(ask(engine, first), ask(engine, second))
        assert [len(answer.tokens[0]) for answer in answers] == [14, 14]

    serve(play(), engine, executor)
    load = engine.load_now().models["wide"]
    assert load.preemptions_total > 0
    assert (load.cached_tokens_total > 0) == bool(again)


def test_prompts_go_whole_and_in_the_order_of_arrival_as_published() -> None:
    executor = ModelledExecutor(200, compute=1)
    engine = engine_over(executor, policy="vllm-2023", chunk_tokens=16)

    async def play() -> None:
        await asyncio.gather(*(ask(engine, order("wide", length, 1)) for length in (6, 8, 20, 3)))

    serve(play(), engine, executor)
    prefills = [job.plan.appends.tolist() for job in executor.jobs if job.phase is Phase.PREFILL]
    assert [count for counts in prefills for count in counts] == [6, 8, 20, 3]
    assert [6, 8] in prefills or prefills[0] == [6]
    assert [20] in prefills  # beyond the bound of a job, and by itself


@pytest.mark.parametrize(("quotas", "most"), [("fixed-sequences", 1), ("adaptive", 8)])
def test_bounds_on_sequences_hold_as_published(quotas: Quotas, most: int) -> None:
    """A pool that is smaller than what a sequence counts for lets one of each model run."""
    executor = ModelledExecutor(400, compute=2)
    engine = engine_over(executor, policy="adbs-2024", quotas=quotas)

    async def play() -> None:
        answers = await asyncio.gather(*(ask(engine, order("wide", 9, 12)) for _ in range(8)))
        assert [len(answer.tokens[0]) for answer in answers] == [12] * 8

    serve(play(), engine, executor)
    steps = [len(job.plan.appends) for job in executor.jobs if job.phase is Phase.DECODE]
    assert max(steps) == most


def test_two_long_prompts_do_not_take_turns_at_preempting() -> None:
    """Each takes most of the pool and more chunks than a model waits before it may take blocks."""
    for policy in POLICIES:
        executor = ModelledExecutor(100, models=("wide", "tall"))
        engine = engine_over(executor, policy=policy, chunk_tokens=1)  # type: ignore[arg-type]
        orders = [order("wide", 90, 3), order("tall", 90, 3), order("wide", 88, 3), order("tall", 88, 3)]

        async def whole(engine: Engine, executor: ModelledExecutor, orders: list[StartGenerate]) -> None:
            async with modelled(engine, executor):
                tasks = [asyncio.create_task(ask(engine, one)) for one in orders]
                await finish(executor, tasks, most_jobs=3 * 4 * 93)

        asyncio.run(whole(engine, executor, orders))


def test_jobs_fit_the_compute_and_prefills_run_beside_decodes() -> None:
    """adbs on several units: one prefill at most, decodes of several models beside it."""
    executor = ModelledExecutor(400, compute=8)
    engine = engine_over(executor, chunk_tokens=8)
    together: set[tuple[str, ...]] = set()
    launch = executor.launch
    running: list[tuple[str, Phase]] = []

    def watched(job: object) -> object:
        future = launch(job)  # type: ignore[arg-type]
        mark = (job.model, job.phase)  # type: ignore[attr-defined]
        running.append(mark)
        future.add_done_callback(lambda _: running.remove(mark))
        assert sum(phase is Phase.PREFILL for _, phase in running) <= 1
        together.add(tuple(sorted(phase.value for _, phase in running)))
        return future

    executor.launch = watched  # type: ignore[method-assign, assignment]

    async def whole() -> None:
        async with modelled(engine, executor):
            orders = [order(name, 30, 20) for name in GEOMETRIES for _ in range(4)]
            tasks = [asyncio.create_task(ask(engine, one)) for one in orders]
            await finish(executor, tasks, most_jobs=2000)

    asyncio.run(whole())
    assert ("decode", "prefill") in together
    assert ("decode", "decode") in together


def test_decodes_of_a_model_are_one_batch() -> None:
    executor = ModelledExecutor(200, compute=1)
    engine = engine_over(executor)

    async def play() -> None:
        await asyncio.gather(*(ask(engine, order("wide", 4, 8)) for _ in range(6)))
        decodes = [job for job in executor.jobs if job.phase is Phase.DECODE]
        assert max(len(job.plan.sequences) for job in decodes) == 6

    serve(play(), engine, executor)


def calls_beside(idle: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns how often kvloom's functions are called for one request on a unit with so many idle models."""
    names = [f"idle{i}" for i in range(idle)]
    for name in names:
        monkeypatch.setitem(GEOMETRIES, name, GEOMETRIES["thin"])
    executor = ModelledExecutor(100, models=["wide", *names])
    engine, calls = engine_over(executor, clock=ManualClock()), 0  # quotas are adapted once a period

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and "/kvloom/" in frame.f_code.co_filename

    async def play() -> None:
        await ask(engine, order("wide", 8, 8))
        sys.setprofile(count)
        try:
            await ask(engine, order("wide", 8, 40))
        finally:
            sys.setprofile(None)

    serve(play(), engine, executor)
    return calls


def test_a_step_costs_no_more_beside_models_that_have_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the check that each view is true looks at every model
    alone = calls_beside(0, monkeypatch)
    assert calls_beside(40, monkeypatch) < 1.02 * alone
