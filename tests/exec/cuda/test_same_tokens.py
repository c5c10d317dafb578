"""Law 2 on the GPU's executor: its tokens are transformers' own, whatever the batch."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.checkpoints import VOCAB, WINDOW, make_checkpoint
from tests.engines import ask, body, spec_of
from tests.exec.cuda.engines import running_on_device
from tests.oracle import Oracle

LENGTHS = (1, 3, WINDOW + 1, 70)  # one of them more than a chunk
COUNT = 5


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mixtral"])
def test_greedy_is_transformers_own(architecture: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, architecture)
    rng = random.Random(architecture)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]

    async def serve() -> list[list[int]]:
        async with running_on_device(spec_of({"m": path}, max_running=4)) as (engine, _):
            answers = await asyncio.gather(*(ask(engine, body("m", p, max_tokens=COUNT)) for p in prompts))
            return [answer.tokens[0] for answer in answers]

    oracle = Oracle(path)
    for prompt, tokens in zip(prompts, asyncio.run(serve()), strict=True):
        assert len(tokens) == COUNT
        oracle.check(prompt, tokens)
