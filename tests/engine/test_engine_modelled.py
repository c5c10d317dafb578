"""The whole engine over a modelled device, under whatever order of events: laws 1 to 5."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Literal, cast

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvloom.core.errors import Unavailable
from kvloom.core.job import Phase
from kvloom.core.request import Event, StartGenerate, TokenEvent
from kvloom.core.sampling import Guide, SamplingParams
from kvloom.core.spec import Policy
from kvloom.engine.batching import POLICIES
from kvloom.engine.engine import Engine
from kvloom.engine.guide import GuideCompiler
from tests.engines import Answer
from tests.modelled import (
    CONTEXT,
    GEOMETRIES,
    VOCAB,
    ModelledExecutor,
    ask,
    engine_over,
    expected,
    finish,
    modelled,
    surprise,
    turns,
)

MOST_JOBS = 20_000


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


def _check(executor: ModelledExecutor, body: StartGenerate, answer: Answer, *, whole: bool) -> None:
    for choice, tokens in expected(executor, body).items():
        found = answer.tokens.get(choice, [])
        assert found == (tokens if whole else tokens[: len(found)])
        if whole:
            stop = tokens[-1] if tokens[-1] in body.sampling.stop_token_ids else None
            assert answer.ends[choice].reason == ("length" if stop is None else "stop")
            assert answer.ends[choice].stop_token == stop
    if body.sampling.prompt_logprobs is not None and whole:
        assert answer.prompt is not None
    if answer.prompt is not None:
        assert body.sampling.prompt_logprobs is not None
        after = [surprise(body.model, body.prompt[:i], body.prompt[i]) for i in range(1, len(body.prompt))]
        assert [one.logprob for one in answer.prompt] == after


_SETTINGS = settings(
    max_examples=200,
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
        _check(executor, visit.body, answer, whole=True)


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
        _check(executor, visit.body, answer, whole=whole)


def test_a_run_replays_exactly() -> None:
    bodies = [_order(f"r{i}", "wide", 20 + i, max_tokens=12) for i in range(6)]
    visits = [Visit(body, i, "abort" if i == 3 else None, 60) for i, body in enumerate(bodies)]
    scenario = Scenario(visits, 60, 3, "adbs", 8, 8, frozenset({9}), 5)
    runs = [asyncio.run(_play(scenario)) for _ in range(2)]
    assert runs[0][0] == runs[1][0]
    first, second = ([(j.model, j.phase, j.share, j.tokens.tolist()) for j in run[1].jobs] for run in runs)
    assert first == second


def _order(
    request: str, model: str, length: int, *, n: int = 1, priority: int = 0, **sampling: object
) -> StartGenerate:
    params = {"max_tokens": 8, "seed": 1} | sampling
    return StartGenerate(
        model=model,
        request=request,
        prompt=[(len(request) * 31 + i) % VOCAB for i in range(length)],
        n=n,
        priority=priority,
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
    )


def _serve(
    play: Coroutine[None, None, None], engine: Engine, executor: ModelledExecutor, most_jobs: int = MOST_JOBS
) -> None:
    async def whole() -> None:
        async with modelled(engine, executor):
            await finish(executor, [asyncio.create_task(play)], most_jobs=most_jobs)

    asyncio.run(whole())


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_prompt_that_fills_the_pool_in_chunks(policy: Policy) -> None:
    executor = ModelledExecutor(40)
    engine = engine_over(executor, policy=policy, chunk_tokens=4)

    async def play() -> None:
        body = _order("r", "wide", 39, max_tokens=1)
        assert (await ask(engine, body)).tokens == expected(executor, body)

    _serve(play(), engine, executor)


def test_a_context_that_the_pool_shortens_is_told(caplog: pytest.LogCaptureFixture) -> None:
    engine_over(ModelledExecutor(40, models=("wide",), context=40))
    assert not caplog.records
    engine_over(ModelledExecutor(40, models=("wide",), context=4000))
    [record] = caplog.records
    assert record.getMessage().startswith("the context of wide is 40 tokens, not 4000")


def test_a_head_size_that_fits_the_blocks_badly_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvloom.engine")
    engine_over(ModelledExecutor(100))
    [record] = caplog.records
    assert record.getMessage() == (
        "6 % of each block of tall is unused: 256 bytes hold 5 tokens of 48 (block_bytes)"
    )


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_two_prompts_beyond_their_quotas(policy: Policy) -> None:
    executor = ModelledExecutor(100, models=("wide", "tall"))
    engine = engine_over(executor, policy=policy, chunk_tokens=1)

    async def play() -> None:
        bodies = [_order("r", "wide", 80), _order("rr", "tall", 80)]  # 88 and 90 blocks
        answers = await asyncio.gather(*(ask(engine, body) for body in bodies))
        for body, answer in zip(bodies, answers, strict=True):
            assert answer.tokens == expected(executor, body)

    _serve(play(), engine, executor, most_jobs=400)  # 160 chunks, at most as many again, and the decodes


def test_a_preempted_choice_does_not_report_the_prompt_again() -> None:
    executor = ModelledExecutor(40, models=("wide",))
    engine = engine_over(executor, max_running=4)

    async def play() -> None:
        body = _order("r", "wide", 9, n=6, max_tokens=20, prompt_logprobs=0)
        answer = await ask(engine, body)
        assert (await engine.load()).models["wide"].preemptions_total > 0
        _check(executor, body, answer, whole=True)

    _serve(play(), engine, executor)


async def _until(true: Callable[[], bool]) -> None:
    while not true():
        await turns(1)


async def _until_in_a_job(executor: ModelledExecutor, count: int = 1) -> None:
    await _until(lambda: len(executor.jobs) >= count and executor.idle < executor.compute)


def test_an_id_used_again_while_the_old_job_runs() -> None:
    """Neither the old job's prompt report nor its failure reaches the new request of the same id."""
    executor = ModelledExecutor(100, failing={1})
    engine = engine_over(executor)

    async def play() -> None:
        for number in range(2):
            old = engine.start_generate(_order("same", "wide", 8, prompt_logprobs=0))
            await anext(old)
            await _until_in_a_job(executor, number + 1)
            await engine.abort("same")
            body = _order("same", "wide", 30)
            answer = await ask(engine, body)
            assert answer.prompt is None
            if number == 0:
                assert answer.ends[0].reason == "error"  # its own first job was told to fail
            else:
                assert answer.tokens == expected(executor, body)
            await old.aclose()

    _serve(play(), engine, executor)


def test_a_failed_job_of_an_old_request_spares_the_new_one_of_its_id() -> None:
    executor = ModelledExecutor(100, failing={0})
    engine = engine_over(executor)

    async def play() -> None:
        old = engine.start_generate(_order("same", "wide", 8))
        await anext(old)
        await _until_in_a_job(executor)
        await engine.abort("same")
        body = _order("same", "wide", 30)
        assert (await ask(engine, body)).tokens == expected(executor, body)
        await old.aclose()

    _serve(play(), engine, executor)


def test_a_slow_reader_of_an_ended_request_does_not_end_its_successor() -> None:
    executor = ModelledExecutor(100)
    engine = engine_over(executor)

    async def play() -> None:
        slow = engine.start_generate(_order("same", "wide", 8))
        await anext(slow)
        await _until_in_a_job(executor)
        await _until(lambda: engine.pool.free == engine.pool.total)
        body = _order("same", "wide", 30, max_tokens=40)
        new = asyncio.create_task(ask(engine, body))
        await turns(5)
        events: list[Event] = [event async for frame in slow for event in frame]
        assert sum(isinstance(event, TokenEvent) for event in events) == 8
        assert (await new).tokens == expected(executor, body)

    _serve(play(), engine, executor)


class _NoToken:
    """A grammar that has nothing to say."""

    done = False

    def mask(self) -> None:
        return None

    def accepts(self, token: int) -> bool:
        return False


def test_a_guide_that_refuses_its_token_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuideCompiler, "start", lambda self, guide, choices: [_NoToken()])
    executor = ModelledExecutor(100)
    engine = engine_over(executor)

    async def play() -> None:
        guided = _order("guided", "wide", 9, guide=Guide("json"))
        plain = _order("plain", "wide", 12)
        ended, answer = await asyncio.gather(ask(engine, guided), ask(engine, plain))
        assert ended.ends[0].reason == "error"
        assert not ended.tokens
        assert answer.tokens == expected(executor, plain)

    _serve(play(), engine, executor)


def test_an_abort_frees_the_blocks_with_the_job_that_runs() -> None:
    executor = ModelledExecutor(100)
    engine = engine_over(executor, chunk_tokens=8)

    async def play() -> None:
        for hangs_up in (False, True):
            stream = engine.start_generate(_order("r", "wide", 60, n=2))
            await anext(stream)
            before = len(executor.jobs)
            await _until_in_a_job(executor, before + 2)
            running = len(executor.jobs)
            assert engine.pool.free < engine.pool.total
            if hangs_up:
                await stream.aclose()
            else:
                await engine.abort("r")
            await _until(lambda: executor.idle == executor.compute)
            await turns(3)
            assert engine.pool.free == engine.pool.total
            assert len(executor.jobs) == running
            await stream.aclose()

    _serve(play(), engine, executor)


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("gone", [{0}, {1}, {0, 2}])
def test_one_choice_given_up_leaves_the_others(gone: set[int], after: int) -> None:
    """Whether their prompt waits still, is being computed, or has a second part to come."""
    executor = ModelledExecutor(100)
    engine = engine_over(executor, chunk_tokens=16)

    async def play() -> None:
        body = _order("r", "wide", 20, n=4)
        asking = asyncio.create_task(ask(engine, body))
        await turns(2)
        if after:
            await _until_in_a_job(executor, after)
        for choice in gone:
            await engine.abort("r", choice)
        answer, whole = await asking, expected(executor, body)
        for choice, tokens in whole.items():
            reason = answer.ends[choice].reason
            assert (reason, answer.tokens.get(choice, [])) == (
                ("abort", []) if choice in gone else ("length", tokens)
            )

    _serve(play(), engine, executor)


def test_stop_ends_every_stream_and_waits_for_the_job() -> None:
    executor = ModelledExecutor(100)
    engine = engine_over(executor)

    async def play() -> None:
        asking = asyncio.create_task(ask(engine, _order("r", "wide", 40, n=3)))
        await _until_in_a_job(executor)
        await engine.stop()
        answer = await asking
        assert {end.reason for end in answer.ends.values()} == {"error"}
        assert {end.message for end in answer.ends.values()} == {"the engine is stopping"}

    _serve(play(), engine, executor)


def test_a_guide_ready_after_the_stop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = threading.Event()

    def slow(compiler: GuideCompiler, guide: Guide, choices: int) -> list[_NoToken]:
        assert ready.wait(10)
        return [_NoToken()]

    monkeypatch.setattr(GuideCompiler, "start", slow)
    executor = ModelledExecutor(100)
    engine = engine_over(executor)

    async def play() -> None:
        asking = asyncio.create_task(ask(engine, _order("guided", "wide", 9, guide=Guide("json"))))
        await turns()
        await engine.stop()
        await turns()
        ready.set()
        with pytest.raises(Unavailable):
            await asyncio.wait_for(asking, 10)

    async def whole() -> None:
        async with modelled(engine, executor):
            await play()

    asyncio.run(whole())


def test_decodes_of_a_model_are_one_batch() -> None:
    executor = ModelledExecutor(200, compute=1)
    engine = engine_over(executor)

    async def play() -> None:
        await asyncio.gather(*(ask(engine, _order(f"r{i}", "wide", 4)) for i in range(6)))
        decodes = [job for job in executor.jobs if job.phase is Phase.DECODE]
        assert max(len(job.plan.sequences) for job in decodes) == 6

    _serve(play(), engine, executor)
