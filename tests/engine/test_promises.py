"""The engine over real models: what callers are promised."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import torch

from kvloom.types.errors import BadRequest, KvloomError, PromptTooLong, QueueFull, Unavailable
from kvloom.types.request import Event
from tests.checkpoints import EOS, VOCAB
from tests.engine.real_fleet import Fleet, spec
from tests.engines import Answer, ask, body, running
from tests.processes import DEADLINE


def test_an_abort_frees_the_blocks_within_one_job(fleet: Fleet) -> None:
    async def play() -> None:
        async with running(spec(fleet)) as engine:
            for hangs_up in (False, True):
                order = body("wide", [1, 2, 3], n=3, max_tokens=200)
                stream: AsyncGenerator[list[Event], None] = engine.start_generate(order)
                frames = 0
                async for _ in stream:
                    frames += 1
                    if frames == 4:
                        break
                jobs = await count(engine.load())
                if hangs_up:
                    await stream.aclose()
                else:
                    await engine.abort(order.request)
                async with asyncio.timeout(DEADLINE):
                    while engine.pool.available < engine.pool.total:
                        await engine.load()
                        await asyncio.sleep(0)
                assert engine.pool.available == engine.pool.total
                assert await count(engine.load()) - jobs <= 1
                await stream.aclose()

    async def count(load: object) -> int:
        models = (await load).models.values()  # type: ignore[misc]
        return sum(m.prefill_jobs_total + m.decode_jobs_total for m in models)

    asyncio.run(play())


def test_what_cannot_be_served_is_refused_at_the_door(fleet: Fleet) -> None:
    async def refused(stream: AsyncGenerator[list[Event], None]) -> KvloomError:
        with pytest.raises(KvloomError) as caught:
            await anext(stream)
        return caught.value

    async def play() -> None:
        async with running(spec(fleet, max_running=1, max_waiting=2)) as engine:
            long = await refused(engine.start_generate(body("wide", [1] * 256)))
            assert isinstance(long, PromptTooLong)
            assert "256 tokens" in str(long)
            assert "holds 256" in str(long)
            for bad, word in (
                (body("wide", [VOCAB]), str(VOCAB)),
                (body("wide", [1], logit_bias={VOCAB: 1.0}), "logit_bias"),
                (body("wide", [1], stop_token_ids=(VOCAB,)), "stop_token_ids"),
            ):
                problem = await refused(engine.start_generate(bad))
                assert isinstance(problem, BadRequest)
                assert word in str(problem)
            let_in = [engine.start_generate(body("wide", [1], max_tokens=50)) for _ in range(2)]
            for stream in let_in:
                await anext(stream)
            full = await refused(engine.start_generate(body("wide", [1])))
            assert isinstance(full, QueueFull)
            assert full.retry_after == 1
            assert (await ask(engine, body("tall", [1], max_tokens=2))).ends[0].reason == "length"
            for stream in let_in:
                await stream.aclose()
            engine.stop()
            assert isinstance(await refused(engine.start_generate(body("wide", [1]))), Unavailable)
        async with running(spec(fleet, blocks=18)) as engine:
            long = await refused(engine.start_generate(body("wide", [1] * 60)))
            assert isinstance(long, PromptTooLong)
            assert "60 tokens, and wide holds 48" in str(long)

    asyncio.run(play())


def test_stop_tokens_and_min_tokens(fleet: Fleet) -> None:
    oracle, prompt = fleet.oracles["wide"], [9, 8, 7, 6]
    free = oracle.greedy(prompt, 16)
    stop = free[5]
    first = free.index(stop)

    async def play() -> None:
        async with running(spec(fleet)) as engine:
            stopped = await ask(engine, body("wide", prompt, stop_token_ids=(stop,)))
            assert stopped.tokens[0] == free[: first + 1]
            assert (stopped.ends[0].reason, stopped.ends[0].stop_token) == ("stop", stop)
            later = await ask(engine, body("wide", prompt, stop_token_ids=(stop,), min_tokens=10))
            tokens = list(prompt)
            for index in range(16):
                logits = oracle.logits(tokens).clone()
                if index < 10:
                    logits[stop] = float("-inf")
                tokens.append(int(logits.argmax()))
                if tokens[-1] == stop:
                    break
            assert later.tokens[0] == tokens[len(prompt) :]
            assert stop not in later.tokens[0][:10]
            always: dict[str, Any] = {"logit_bias": {EOS: 100.0}, "max_tokens": 5}
            ignored = await ask(
                engine, body("wide", prompt, **always)
            )  # the engine knows only stop_token_ids
            assert ignored.tokens[0] == [EOS] * 5
            assert ignored.ends[0].reason == "length"
            heeded = await ask(engine, body("wide", prompt, stop_token_ids=(EOS,), **always))
            assert heeded.tokens[0] == [EOS]
            full = await ask(engine, body("wide", [3] * 250, max_tokens=100))
            assert (len(full.tokens[0]), full.ends[0].reason) == (6, "length")  # up to its context of 256

    asyncio.run(play())


def test_logprobs_are_the_oracles(fleet: Fleet) -> None:
    """Prompt reports come in chunks of 7, and more than one at a time where somebody is preempted, which is a
    matter of how fast jobs are; they are whole."""
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (2, 7, 8, 33, 61)]

    async def play() -> list[tuple[list[int], Answer]]:
        async with running(spec(fleet, blocks=42, chunk_tokens=7)) as engine:
            asked = [
                body("wide", p, n=2, max_tokens=20, logprobs=3, prompt_logprobs=2, logit_bias={4: 5.0})
                for p in prompts
            ]
            answers = await asyncio.gather(*(ask(engine, one) for one in asked))
            assert (await engine.load()).models["wide"].prefill_jobs_total >= sum(map(len, prompts)) // 7
            return list(zip(prompts, answers, strict=True))

    model = fleet.oracles["wide"].model
    for prompt, answer in asyncio.run(play()):
        tokens = prompt + answer.tokens[0]
        with torch.inference_mode():
            normal = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
        reports = [*(answer.prompt or []), *answer.logprobs[0]]
        assert len(reports) == len(tokens) - 1
        for position, report in enumerate(reports):
            assert report is not None
            assert report.logprob == pytest.approx(float(normal[position, tokens[position + 1]]), abs=1e-4)
            best = normal[position].topk(len(report.top))
            assert [value for _, value in report.top] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert len(report.top) == (2 if position < len(prompt) - 1 else 3)
