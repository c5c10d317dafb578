"""Law 2 across a loan: a hot unit and a cold one, in two processes, answer as each would alone."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.checkpoints import VOCAB, make_checkpoint
from tests.engines import ask, body, spec_of
from tests.oracle import Oracle
from tests.weaving import MODEL, PAGES, cold_unit, weaving

COUNT = 24


def prompts_of(seed: str, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.choice((1, 3, 17, 40, 90)))] for _ in range(count)]


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "gpt2"])
def test_the_tokens_are_those_of_each_unit_alone(architecture: str, tmp_path: Path) -> None:
    hot_path = make_checkpoint(tmp_path / "hot", architecture)
    cold_path = make_checkpoint(tmp_path / "cold", "llama", seed=3)
    prompts, others = prompts_of(architecture, 12), prompts_of("cold", 4)

    async def serve() -> tuple[list[list[int]], list[list[int]]]:
        with cold_unit(cold_path) as cold:
            async with weaving(spec_of({MODEL: hot_path}, threads=1)) as hot:
                terms = hot.weaving.terms(MODEL, PAGES)
                hot.weaving.borrow(terms, await cold.lend(terms), 0.6)
                asked = [ask(hot, body(MODEL, p, max_tokens=COUNT)) for p in prompts]
                both = await asyncio.gather(cold.call("generate", prompts=others, count=COUNT), *asked)
                found, answers = both[0], both[1:]
            while await cold.call("lent"):
                await asyncio.sleep(0.01)
        return [answer.tokens[0] for answer in answers], found

    found, colds = asyncio.run(serve())
    oracle, other = Oracle(hot_path), Oracle(cold_path)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert len(tokens) == COUNT
        oracle.check_at_once(prompt, tokens)
    for prompt, tokens in zip(others, colds, strict=True):
        other.check_at_once(prompt, tokens)
    print(f"{architecture}: {oracle.ties + other.ties} ties")
