"""Law 2 for mixed jobs: tokens of decodes and of prompts that are in one forward are transformers' own."""

from __future__ import annotations

import asyncio
import random
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from msgspec import structs

from kvloom.engine.batching import POLICIES
from kvloom.engine.engine import Engine
from kvloom.types.spec import EngineSpec
from tests.checkpoints import VOCAB, WINDOW, make_checkpoint
from tests.engines import Answer, ask, body, running, spec_of
from tests.exec.cuda.engines import running_on_device
from tests.oracle import Oracle

LENGTHS = (3, 90, 1, WINDOW + 1, 130, 17)


def prompts_of(seed: str) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


async def staggered(engine: Engine, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Each prompt comes when the one before it has made its first token, so that decodes are under way."""
    tasks, firsts = [], [asyncio.Event() for _ in prompts]

    async def one(i: int) -> list[int]:
        tokens: list[int] = []
        async for frame in engine.start_generate(body("m", prompts[i], max_tokens=count)):
            tokens += [event.token for event in frame if hasattr(event, "token")]
            if tokens:
                firsts[i].set()
        return tokens

    for i in range(len(prompts)):
        tasks.append(asyncio.create_task(one(i)))
        await firsts[i].wait()
    return list(await asyncio.gather(*tasks))


async def serve(
    running: AbstractAsyncContextManager[Engine], prompts: list[list[int]], count: int
) -> tuple[list[list[int]], int]:
    """The answers, and how many jobs were mixed."""
    async with running as engine:
        found = await staggered(engine, prompts, count)
        load = (await engine.load()).models["m"]
        assert load.prompt_tokens_total == sum(map(len, prompts))
        assert load.output_tokens_total == count * len(prompts)
        return found, load.mixed_jobs_total


def check(path: Path, prompts: list[list[int]], found: list[list[int]]) -> None:
    oracle = Oracle(path)
    for prompt, tokens in zip(prompts, found, strict=True):
        oracle.check(prompt, tokens)


def one_core(path: Path, **changes: int) -> EngineSpec:
    return structs.replace(spec_of({"m": path}, threads=1), **changes)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "mixtral"])
def test_tokens_of_mixed_jobs_are_transformers_own(architecture: str, tmp_path: Path) -> None:
    path, prompts = make_checkpoint(tmp_path, architecture), prompts_of(architecture)
    found, mixed = asyncio.run(serve(running(one_core(path)), prompts, 40))
    assert mixed > len(prompts)
    check(path, prompts, found)


def test_tokens_of_mixed_jobs_over_ranks_are_transformers_own(tmp_path: Path) -> None:
    path, prompts = make_checkpoint(tmp_path, "llama", num_key_value_heads=2), prompts_of("ranks")
    found, mixed = asyncio.run(serve(running(one_core(path, tensor_parallel=2, threads=2)), prompts, 40))
    assert mixed > len(prompts)
    check(path, prompts, found)


def test_tokens_of_mixed_jobs_on_a_device_are_transformers_own(tmp_path: Path) -> None:
    """There they take the way of a prefill. The policy of a GPU's unit does not ask for them."""
    path, prompts = make_checkpoint(tmp_path, "llama"), prompts_of("device")

    async def serve() -> tuple[list[list[int]], int]:
        async with running_on_device(spec_of({"m": path}, max_running=8)) as (engine, _):
            late: list[asyncio.Task[Answer]] = []
            begun = Answer()
            async for frame in engine.start_generate(body("m", prompts[0], max_tokens=30)):
                begun.take(frame)
                if frame and not late:
                    asked = (body("m", prompt, max_tokens=5) for prompt in prompts[1:])
                    late = [asyncio.create_task(ask(engine, one)) for one in asked]
            answers = [begun, *await asyncio.gather(*late)]
            mixed = (await engine.load()).models["m"].mixed_jobs_total
            return [answer.tokens[0] for answer in answers], mixed

    found, mixed = asyncio.run(serve())
    assert mixed > 0
    check(path, prompts, found)


def test_tokens_drawn_in_mixed_jobs_are_those_drawn_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompts = make_checkpoint(tmp_path, "llama"), prompts_of("drawn")
    adbs = POLICIES["adbs"]

    async def drawn() -> tuple[list[object], int]:
        asked = [
            body("m", prompt, n=1 + i % 2, temperature=0.9, top_p=0.95, seed=i, logprobs=0, max_tokens=30)
            for i, prompt in enumerate(prompts)
        ]
        async with running(one_core(path)) as engine:
            early = asyncio.create_task(ask(engine, asked[0]))
            await asyncio.sleep(0)
            answers = [await early, *await asyncio.gather(*(ask(engine, one) for one in asked[1:]))]
            mixed = (await engine.load()).models["m"].mixed_jobs_total
        return [sorted(answer.tokens.items()) for answer in answers], mixed

    together, mixed = asyncio.run(drawn())
    assert mixed > 0
    monkeypatch.setitem(POLICIES, "adbs", lambda view: adbs(structs.replace(view, mixes=False)))
    apart, none = asyncio.run(drawn())
    assert none == 0
    assert together == apart
