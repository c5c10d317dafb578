"""Law 2 where two processes weave over one GPU: rows away are posted to the other's memory, and collected."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from kvloom.engine.engine import Engine
from tests.checkpoints import VOCAB, make_checkpoint
from tests.engines import Answer, ask, body
from tests.exec.cuda.woven import cold_unit, gpu_spec, weaving_on_gpu
from tests.oracle import Oracle
from tests.weaving import MODEL, until, woven_of

COUNT, PAGES = 24, 40


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    """Hot and cold, of unlike geometry."""
    return make_checkpoint(tmp_path / "h", "gemma2"), make_checkpoint(tmp_path / "c", "llama", seed=1)


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(VOCAB) for _ in range(rng.choice((1, 3, 17, 33, 90)))] for _ in range(count)]


async def generate(engine: Engine, asked: list[list[int]]) -> list[Answer]:
    return await asyncio.gather(*(ask(engine, body(MODEL, p, max_tokens=COUNT)) for p in asked))


def check(path: Path, asked: list[list[int]], answers: list[Answer]) -> None:
    oracle = Oracle(path)
    for prompt, answer in zip(asked, answers, strict=True):
        assert len(answer.tokens[0]) == COUNT
        oracle.check_at_once(prompt, answer.tokens[0])


def test_no_share_changes_a_token_and_a_cold_unit_that_dies_is_not_waited_for(
    paths: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """One pair for all of it: loading takes longest."""
    asked = prompts(8)

    async def serve() -> list[Answer]:
        with cold_unit(paths[1], gpu=True) as (lend, process):
            async with weaving_on_gpu(gpu_spec(MODEL, paths[0], 8)) as hot:
                terms = hot.borrower.terms(MODEL, PAGES)
                hot.borrower.borrow(terms, await lend(terms), 0.5)
                answers = await generate(hot, asked)
                hot.borrower.set_share(MODEL, 1.0)
                answers += await generate(hot, asked)
                tokens = woven_of(hot).tokens
                assert tokens > COUNT  # and the loan is not over
                tasks = [asyncio.create_task(ask(hot, body(MODEL, p, max_tokens=COUNT))) for p in asked]
                await until(lambda: woven_of(hot).tokens > tokens + 4)
                process.kill()
                answers += await asyncio.gather(*tasks)
                assert hot.borrower.loan(MODEL) is None
                return answers

    check(paths[0], 3 * asked, asyncio.run(serve()))
    assert "is gone" in caplog.text
