"""Law 2 on real architectures: our tokens are transformers' own."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.checkpoints import ARCHITECTURES, VOCAB, WINDOW, make_checkpoint
from tests.engines import ask, body, running, spec_of
from tests.oracle import Oracle

LENGTHS = (1, 3, 17, WINDOW, WINDOW + 1, 90, 130)  # ragged; past the window; more than a chunk
COUNT = 20


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_greedy_is_transformers_own(architecture: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, architecture)
    rng = random.Random(architecture)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]

    async def serve() -> list[list[int]]:
        async with running(spec_of({"m": path})) as engine:
            answers = await asyncio.gather(*(ask(engine, body("m", p, max_tokens=COUNT)) for p in prompts))
            load = await engine.load()
            assert load.models["m"].decode_jobs_total < COUNT * len(prompts)  # they were batched
            return [answer.tokens[0] for answer in answers]

    oracle = Oracle(path)
    found = asyncio.run(serve())
    for prompt, tokens in zip(prompts, found, strict=True):
        assert len(tokens) == COUNT
        oracle.check_at_once(prompt, tokens)
    oracle.check(prompts[-1], found[-1])  # `generate` itself, which takes a forward a token
    distinct = len({token for tokens in found for token in tokens})
    assert distinct > (5 if oracle.model.config.tie_word_embeddings else COUNT)  # it has something to say
    print(f"{architecture}: {oracle.ties} ties")
