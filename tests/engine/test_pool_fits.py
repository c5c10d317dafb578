"""What the engine does, and says, where prompts are as large as the pool."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvloom.engine.batching import POLICIES
from kvloom.types.spec import Policy
from tests.engine.plays import order, serve
from tests.modelled import ModelledExecutor, ask, engine_over, expected


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_prompt_that_fills_the_pool_in_chunks(policy: Policy) -> None:
    executor = ModelledExecutor(40)
    engine = engine_over(executor, policy=policy, chunk_tokens=4)

    async def play() -> None:
        body = order("r", "wide", 39, max_tokens=1)
        assert (await ask(engine, body)).tokens == expected(executor, body)

    serve(play(), engine, executor)


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
        bodies = [order("r", "wide", 80), order("rr", "tall", 80)]  # 88 and 90 blocks
        answers = await asyncio.gather(*(ask(engine, body) for body in bodies))
        for body, answer in zip(bodies, answers, strict=True):
            assert answer.tokens == expected(executor, body)

    serve(play(), engine, executor, most_jobs=400)  # 160 chunks, at most as many again, and the decodes
