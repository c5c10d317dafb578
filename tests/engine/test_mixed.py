"""Mixed jobs: a prompt's chunk and a decode step in one. Tokens are those of a lone engine, and nobody waits
for a whole prefill."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvloom.engine.batching.adbs import LONGER
from kvloom.engine.batching.job_times import WEIGHT_READ_TOKENS
from kvloom.types.job import Job, Phase
from kvloom.types.request import StartGenerate
from tests.engine.plays import check, order, serve, until
from tests.examples import examples
from tests.modelled import ModelledExecutor, ask, engine_over


def mixed(jobs: list[Job]) -> list[Job]:
    return [job for job in jobs if job.phase is Phase.MIXED]


def random_orders(draw: random.Random, models: list[str]) -> list[StartGenerate]:
    """Prompts with and without choices and log-probabilities of their own."""
    found = []
    for i in range(draw.randint(4, 12)):
        model, length, n = draw.choice(models), draw.randint(1, 60), draw.choice((1, 1, 3))
        told = 0 if draw.random() < 0.2 else None
        most = draw.randint(1, 20)
        found.append(order(f"r{'x' * i}", model, length, n=n, seed=i, max_tokens=most, prompt_logprobs=told))
    return found


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    compute=st.sampled_from([1, 1, 2]),
    blocks=st.sampled_from([110, 140, 400]),
    models=st.sampled_from([["wide"], ["wide", "tall", "thin"]]),
)
def test_tokens_are_those_of_a_lone_engine(seed: int, compute: int, blocks: int, models: list[str]) -> None:
    """Also where the pool is short, so that some are preempted. The play checks streams and blocks."""
    draw = random.Random(seed)
    executor = ModelledExecutor(blocks, compute=compute, seed=seed, models=models)
    engine, orders = engine_over(executor), random_orders(draw, models)

    async def play() -> None:
        answers = await asyncio.gather(*(ask(engine, one) for one in orders))
        for one, answer in zip(orders, answers, strict=True):
            check(executor, one, answer, whole=True)

    serve(play(), engine, executor)


def test_decodes_go_with_the_chunks_of_a_prompt() -> None:
    """A step of every job has all that decode in it, first in the batch, and a bounded chunk behind them."""
    executor = ModelledExecutor(400, compute=1, models=["wide"])
    engine = engine_over(executor, chunk_tokens=64)
    first, second = order("a", "wide", 4, max_tokens=30), order("bb", "wide", 80, max_tokens=4)

    async def play() -> None:
        one = asyncio.create_task(ask(engine, first))
        await until(lambda: len(executor.jobs) > 3)
        check(executor, second, await ask(engine, second), whole=True)
        check(executor, first, await one, whole=True)
        load = (await engine.load()).models["wide"]
        found = mixed(executor.jobs)
        assert load.mixed_jobs_total == len(found)
        assert load.prefill_jobs_total == len(found) + 1
        assert load.prompt_tokens_total == 84
        assert load.output_tokens_total == 34
        assert load.decode_jobs_total == len(executor.jobs) - 1

    serve(play(), engine, executor)
    chunk = (LONGER - 1) * (WEIGHT_READ_TOKENS + 1)
    assert [job.plan.appends.tolist() for job in mixed(executor.jobs)] == [
        [1, chunk],
        [1, chunk],
        [1, 80 - 2 * chunk],
    ]
    assert not any(job.phase is Phase.PREFILL for job in executor.jobs[1:])


def test_a_prompt_that_was_computed_in_mixed_jobs_is_cached_at_once() -> None:
    executor = ModelledExecutor(400, compute=1, models=["wide"])
    engine = engine_over(executor, chunk_tokens=64)
    first, second = order("a", "wide", 4, max_tokens=60), order("bb", "wide", 80, max_tokens=12)
    again = replace(second, request="again")

    async def play() -> None:
        one = asyncio.create_task(ask(engine, first))
        await until(lambda: len(executor.jobs) > 3)
        two = asyncio.create_task(ask(engine, second))
        await until(lambda: bool(mixed(executor.jobs)) and executor.jobs[-1].phase is Phase.DECODE)
        answer = await ask(engine, again)
        assert answer.ends[0].cached_tokens == 79
        check(executor, again, answer, whole=True)
        check(executor, second, await two, whole=True)
        check(executor, first, await one, whole=True)

    serve(play(), engine, executor)


def test_two_models_take_turns_with_mixed_jobs() -> None:
    """While both have prompts and decodes, no step of one model waits for more than a job of the other."""
    executor = ModelledExecutor(2000, compute=1, models=["wide", "tall"])
    engine = engine_over(executor, chunk_tokens=64, max_running=8)
    began = [order(f"{m}{'x' * i}", m, 3, max_tokens=60) for m in ("wide", "tall") for i in range(2)]
    late = [order(f"{m}{'y' * (i + 1)}", m, 90, max_tokens=2) for m in ("wide", "tall") for i in range(3)]

    async def play() -> None:
        early = [asyncio.create_task(ask(engine, one)) for one in began]
        await until(lambda: sum(job.phase is Phase.DECODE for job in executor.jobs) > 4)
        came = len(executor.jobs)
        await asyncio.gather(*(ask(engine, one) for one in late))
        both = executor.jobs[came + 1 : came + 9]
        assert [job.model for job in both] in (["wide", "tall"] * 4, ["tall", "wide"] * 4)
        assert all(job.phase is Phase.MIXED for job in both)
        await asyncio.gather(*early)

    serve(play(), engine, executor)


@pytest.mark.parametrize("seed", range(4))
def test_a_mixed_job_that_fails_ends_its_prompt_alone(seed: int) -> None:
    """What decoded beside it is computed again, and goes on."""
    executor = ModelledExecutor(400, compute=1, seed=seed, models=["wide"])
    engine = engine_over(executor, chunk_tokens=64)
    first, second, third = (order("a" * i, "wide", 70, max_tokens=30) for i in (1, 2, 3))

    async def play() -> None:
        one = asyncio.create_task(ask(engine, first))
        await until(lambda: len(executor.jobs) > 3)
        two = asyncio.create_task(ask(engine, second))
        await until(lambda: bool(mixed(executor.jobs)))
        executor.failing = [executor.jobs.index(mixed(executor.jobs)[-1])]
        assert (await two).ends[0].reason == "error"
        check(executor, first, await one, whole=True)
        check(executor, third, await ask(engine, third), whole=True)

    serve(play(), engine, executor)


def test_an_abort_during_a_mixed_job_gives_its_blocks_back() -> None:
    executor = ModelledExecutor(400, compute=1, models=["wide"])
    engine = engine_over(executor, chunk_tokens=64)
    first, second = order("a", "wide", 4, max_tokens=40), order("bb", "wide", 80, max_tokens=4)

    async def play() -> None:
        one = asyncio.create_task(ask(engine, first))
        await until(lambda: len(executor.jobs) > 3)
        two = asyncio.create_task(ask(engine, second))
        await until(lambda: bool(mixed(executor.jobs)))
        await engine.abort("bb")
        assert (await two).ends[0].reason == "abort"
        check(executor, first, await one, whole=True)

    serve(play(), engine, executor)
