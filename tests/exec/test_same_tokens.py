"""Law 2 on real architectures: our tokens are transformers' own, on the CPU and on a device."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from kvloom.engine.engine import Engine
from tests.checkpoints import ARCHITECTURES, VOCAB, WINDOW, make_checkpoint
from tests.engines import ask, body, running, spec_of
from tests.exec.cuda.engines import running_on_device
from tests.oracle import Oracle

LENGTHS = (1, 3, 17, WINDOW, WINDOW + 1, 90, 130)  # ragged; past the window; more than a chunk
COUNT = 20


def prompts_of(architecture: str, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(architecture)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


async def greedy(engine: Engine, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The answers to all at once, which were batched."""
    answers = await asyncio.gather(*(ask(engine, body("m", p, max_tokens=count)) for p in prompts))
    load = await engine.load()
    assert load.models["m"].decode_jobs_total < count * len(prompts)
    assert {len(answer.tokens[0]) for answer in answers} == {count}
    return [answer.tokens[0] for answer in answers]


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_greedy_is_transformers_own(architecture: str, tmp_path: Path) -> None:
    path, prompts = make_checkpoint(tmp_path, architecture), prompts_of(architecture, LENGTHS)

    async def serve() -> list[list[int]]:
        async with running(spec_of({"m": path})) as engine:
            return await greedy(engine, prompts, COUNT)

    oracle = Oracle(path)
    found = asyncio.run(serve())
    for prompt, tokens in zip(prompts, found, strict=True):
        oracle.check_at_once(prompt, tokens)
    oracle.check(prompts[-1], found[-1])  # `generate` itself, which takes a forward a token
    distinct = len({token for tokens in found for token in tokens})
    assert distinct > (5 if oracle.model.config.tie_word_embeddings else COUNT)  # it has something to say
    print(f"{architecture}: {oracle.ties} ties")


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mixtral", "falcon", "deepseek_v2"])
def test_greedy_on_a_device_is_transformers_own(architecture: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, architecture)
    prompts = prompts_of(architecture, (1, 3, WINDOW + 1, 70))

    async def serve() -> list[list[int]]:
        async with running_on_device(spec_of({"m": path}, max_running=4)) as (engine, _):
            return await greedy(engine, prompts, 5)

    oracle = Oracle(path)
    for prompt, tokens in zip(prompts, asyncio.run(serve()), strict=True):
        oracle.check(prompt, tokens)
