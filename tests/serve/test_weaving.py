"""Law 2 across a loan: a hot unit and a cold one, in two processes, answer as each would alone."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from tests.checkpoints import VOCAB, make_checkpoint
from tests.engines import ask, body, spec_of
from tests.oracle import Oracle
from tests.serve.woven import run
from tests.weaving import MODEL, PAGES, cold_unit, weaving, woven_of

COUNT = 24


def prompts_of(seed: str, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.choice((1, 3, 17, 40, 90)))] for _ in range(count)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A hot model, and a cold one of another geometry."""
    folder = tmp_path_factory.mktemp("woven")
    return make_checkpoint(folder / "hot", "gemma2"), make_checkpoint(folder / "cold", "llama", seed=3)


def test_the_tokens_are_those_of_each_unit_alone(paths: tuple[Path, Path]) -> None:
    hot_path, cold_path = paths
    prompts, others = prompts_of("hot", 12), prompts_of("cold", 4)

    async def serve() -> tuple[list[list[int]], list[list[int]]]:
        with cold_unit(cold_path) as cold:
            async with weaving(spec_of({MODEL: hot_path}, threads=1)) as hot:
                terms = hot.borrower.terms(MODEL, PAGES)
                hot.borrower.borrow(terms, await cold.lend(terms), 0.6)
                asked = [ask(hot, body(MODEL, p, max_tokens=COUNT)) for p in prompts]
                both = await asyncio.gather(cold.call("generate", prompts=others, count=COUNT), *asked)
                found, answers = both[0], both[1:]
                woven = woven_of(hot)
                assert woven.tokens > len(prompts)
        return [answer.tokens[0] for answer in answers], found

    found, colds = asyncio.run(serve())
    oracle, other = Oracle(hot_path), Oracle(cold_path)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert len(tokens) == COUNT
        oracle.check_at_once(prompt, tokens)
    for prompt, tokens in zip(others, colds, strict=True):
        other.check_at_once(prompt, tokens)
    print(f"{oracle.ties + other.ties} ties")


def test_a_cold_unit_that_stands_still_costs_no_token(paths: tuple[Path, Path]) -> None:
    prompts = prompts_of("fault", 6)

    async def serve() -> list[list[int]]:
        with cold_unit(paths[1]) as cold:
            async with weaving(spec_of({MODEL: paths[0]}, threads=1), patience=0.5) as hot:
                terms = hot.borrower.terms(MODEL, PAGES)
                hot.borrower.borrow(terms, await cold.lend(terms), 1.0)

                async def strike() -> None:
                    """When a first request has five tokens."""
                    frames = 0
                    async for _ in hot.start_generate(body(MODEL, [7], max_tokens=COUNT)):
                        frames += 1
                        if frames == 5:
                            os.kill(cold.process.pid, signal.SIGSTOP)

                asked = [ask(hot, body(MODEL, p, max_tokens=COUNT)) for p in prompts]
                answers = await asyncio.gather(*asked, strike())
                assert hot.borrower.loan(MODEL) is None
            cold.process.kill()
        return [answer.tokens[0] for answer in answers if answer is not None]

    oracle = Oracle(paths[0])
    for prompt, tokens in zip(prompts, asyncio.run(serve()), strict=True):
        assert len(tokens) == COUNT
        oracle.check_at_once(prompt, tokens)


def test_the_tokens_are_the_oracle_s_whatever_happens(tmp_path: Path) -> None:
    """A few of what `python -m tests.serve.woven` serves many of: recalls, deaths, another share."""
    [tally] = run(20, ("qwen2",), tmp_path).values()
    print(f"{tally.ties} ties")
    assert tally.requests >= 20
    assert min(tally.shares, tally.recalls, tally.kills, tally.preempted) > 0
    assert 0 < tally.away < tally.tokens
    assert tally.cold > 0
