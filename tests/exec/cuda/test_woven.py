"""Law 2 where rows of a device's decode steps are away: a hot and a cold engine beside each other."""

from __future__ import annotations

import asyncio
import functools
import random
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from kvloom.engine.engine import Engine
from kvloom.exec.cuda.offloaded import CudaLoans
from kvloom.exec.cuda.operations import Operations
from kvloom.kernels.cuda.flash import FlashAttention
from kvloom.offload.cuda import CudaOffloadBackend
from kvloom.types.errors import BadRequest
from kvloom.types.spec import EngineSpec
from tests import interpreter
from tests.checkpoints import VOCAB, make_checkpoint
from tests.engines import Answer, ask, body, spec_of
from tests.exec.cuda.flash import flash
from tests.exec.cuda.woven import cold_unit, interpreted, twins, weaving_on_device
from tests.oracle import Oracle
from tests.weaving import MODEL, until, woven_of

COUNT, PAGES = 8, 40
FAMILIES = ("qwen2", "gemma2")  # biases; windows and bent scores


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Threads that wait for each other, as devices do, change more often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the hot model, where it does not matter which."""
    return make_checkpoint(tmp_path_factory.mktemp("hot"), "qwen2")


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("cold"), "llama", seed=1)


@asynccontextmanager
async def pair(
    hot: Path, cold: Path, operations: Operations | None = None
) -> AsyncIterator[tuple[Engine, Engine]]:
    """Hot and cold."""
    async with (
        weaving_on_device(spec_of({"cold": cold}, max_running=4), operations) as lender,
        weaving_on_device(spec_of({MODEL: hot}, max_running=8), operations) as borrower,
    ):
        yield borrower, lender


def lend(hot: Engine, cold: Engine, share: float, **how: Any) -> None:
    terms = structs.replace(hot.borrower.terms(MODEL, PAGES), **how)
    hot.borrower.borrow(terms, cold.lender.lend(terms), share)


def loans_of(engine: Engine) -> CudaLoans:
    backend = engine.borrower._backend
    assert isinstance(backend, CudaOffloadBackend)
    loans = backend._executor.loans
    assert isinstance(loans, CudaLoans)
    return loans


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.choice((1, 3, 17, 33, 60)))] for _ in range(count)]


async def generate(engine: Engine, asked: list[list[int]], model: str = MODEL) -> list[Answer]:
    return await asyncio.gather(*(ask(engine, body(model, p, max_tokens=COUNT)) for p in asked))


_oracle = functools.cache(Oracle)


def check(path: Path, asked: list[list[int]], answers: list[Answer]) -> None:
    oracle = _oracle(path)
    for prompt, answer in zip(asked, answers, strict=True):
        assert len(answer.tokens[0]) == COUNT
        oracle.check_at_once(prompt, answer.tokens[0])


async def stir(hot: Engine, rng: random.Random) -> None:
    """Another share after every frame of a request."""
    async for _ in hot.start_generate(body(MODEL, [1, 2], max_tokens=2 * COUNT)):
        hot.borrower.set_share(MODEL, rng.choice((0.0, 0.5, 1.0)))


@pytest.mark.parametrize(("family", "attention"), [*((one, None) for one in FAMILIES), ("gemma2", flash())])
def test_no_share_changes_a_token(
    tmp_path: Path, cold: Path, family: str, attention: FlashAttention | None
) -> None:
    """Nor a token of the cold unit, which computes its own meanwhile."""
    operations = replace(twins(), flash=attention)
    path, asked, own = make_checkpoint(tmp_path, family), prompts(6, len(family)), prompts(2, 9)

    async def serve() -> tuple[list[Answer], list[Answer]]:
        async with pair(path, cold, operations) as (hot, lender):
            lend(hot, lender, 0.5)
            answers, others, _ = await asyncio.gather(
                generate(hot, asked), generate(lender, own, "cold"), stir(hot, random.Random(family))
            )
            woven = woven_of(hot)
            assert min(woven.went, woven.came, woven.tokens) > 3
            assert woven.count == 0
            woven.pool.check()
            return answers, others

    answers, others = asyncio.run(serve())
    check(path, asked, answers)
    check(cold, own, others)


def test_all_are_away_and_none_is_at_home(path: Path, cold: Path) -> None:
    asked = prompts(4)

    async def serve() -> list[Answer]:
        async with pair(path, cold) as (hot, lender):
            lend(hot, lender, 1.0)
            answers = await generate(hot, asked)
            assert woven_of(hot).tokens >= len(asked) * (COUNT - 1) - 10  # they go one after the other
            return answers

    check(path, asked, asyncio.run(serve()))


def test_where_tasks_wait_for_the_host_no_forward_polls(path: Path, cold: Path) -> None:
    asked = prompts(3, seed=6)

    async def serve() -> tuple[list[Answer], list[Answer]]:
        async with pair(path, cold) as (hot, lender):
            lend(hot, lender, 1.0, control="iterations")
            found = await asyncio.gather(generate(hot, asked), generate(lender, asked, "cold"))
            assert woven_of(hot).tokens > COUNT
            assert loans_of(lender)._polled is None
            return found

    answers, others = asyncio.run(serve())
    check(path, asked, answers)
    check(cold, asked, others)


@pytest.mark.skipif(not interpreter.INSTALLED, reason="triton is not installed: pip install '.[gpu]'")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu does this on the device")
def test_by_the_kernels_a_gpu_runs(tmp_path: Path, cold: Path) -> None:
    path, asked = make_checkpoint(tmp_path, "mistral", num_hidden_layers=1), prompts(2, 3)

    async def serve() -> list[Answer]:
        async with pair(path, cold, interpreted()) as (hot, lender):
            lend(hot, lender, 1.0)
            answers = await generate(hot, asked)
            assert woven_of(hot).tokens > COUNT
            return answers

    interpreter.load()
    with interpreter.interpreting():
        answers = asyncio.run(serve())
    check(path, asked, answers)


def test_the_cold_unit_wants_its_blocks_back(path: Path, cold: Path) -> None:
    asked = prompts(4, seed=1)

    async def serve() -> list[Answer]:
        async with pair(path, cold) as (hot, lender):
            lend(hot, lender, 1.0)

            async def recall() -> None:
                frames = 0
                async for _ in hot.start_generate(body(MODEL, [5], max_tokens=COUNT)):
                    frames += 1
                    if frames == 3:
                        lender.lender.recall()

            answers, _ = await asyncio.gather(generate(hot, asked), recall())
            assert hot.borrower.loan(MODEL) is None
            await until(lambda: not lender.pool.lent)
            lend(hot, lender, 1.0)  # and lends again
            await generate(hot, asked[:1])
            return answers

    check(path, asked, asyncio.run(serve()))


def test_a_cold_unit_that_never_answers_is_waited_for_so_long(
    path: Path, cold: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And what was away is computed again, as if it had died."""
    asked = prompts(3, seed=2)
    silent = replace(twins(), serve=lambda *_: None)

    async def serve() -> list[Answer]:
        async with (
            weaving_on_device(spec_of({"cold": cold}, max_running=1), silent) as lender,
            weaving_on_device(spec_of({MODEL: path}, max_running=4), looks=30) as hot,
        ):
            lend(hot, lender, 1.0)
            answers = await generate(hot, asked)
            assert hot.borrower.loan(MODEL) is None
            await until(lambda: not lender.pool.lent)  # the borrower has left
            return answers

    check(path, asked, asyncio.run(serve()))
    assert "has not attended" in caplog.text


def test_a_cold_unit_that_dies_is_not_waited_for(
    path: Path, cold: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process is watched: nothing else would end this wait."""
    asked = prompts(3, seed=5)

    async def serve() -> list[Answer]:
        with cold_unit(cold) as (unit, process):
            async with weaving_on_device(spec_of({MODEL: path}, max_running=4)) as hot:
                terms = hot.borrower.terms(MODEL, PAGES)
                hot.borrower.borrow(terms, await unit(terms), 1.0)
                tasks = [asyncio.create_task(ask(hot, body(MODEL, p, max_tokens=COUNT))) for p in asked]
                await until(lambda: woven_of(hot).tokens > 2)
                process.kill()
                answers = await asyncio.gather(*tasks)
                assert hot.borrower.loan(MODEL) is None
                return answers

    check(path, asked, asyncio.run(serve()))
    assert "is gone" in caplog.text


def test_k_and_v_in_fp8_are_not_lent(path: Path, cold: Path) -> None:
    def kept(name: str, path: Path) -> EngineSpec:
        spec = spec_of({name: path}, max_running=4)
        models = tuple(structs.replace(one, kv_dtype="float8_e4m3fn") for one in spec.models)
        return structs.replace(spec, models=models)

    async def test() -> None:
        async with (
            weaving_on_device(kept("cold", cold)) as lender,
            weaving_on_device(kept(MODEL, path)) as borrower,
        ):
            with pytest.raises(BadRequest, match="borrow: float8_e4m3fn; want"):
                lend(borrower, lender, 0.5)

    asyncio.run(test())


def test_two_units_that_borrow_of_each_other(path: Path) -> None:
    """A step that waits for the other's attention does not keep the other's from being done."""
    asked = prompts(3, seed=8)

    async def serve() -> list[Answer]:
        async with (
            weaving_on_device(spec_of({MODEL: path}, max_running=4)) as first,
            weaving_on_device(spec_of({MODEL: path}, max_running=4)) as second,
        ):
            lend(first, second, 1.0)
            lend(second, first, 1.0)
            found = await asyncio.gather(generate(first, asked), generate(second, asked))
            assert all(woven_of(one).tokens > COUNT for one in (first, second))
            steps = loans_of(first)._borrowed[MODEL]._steps
            assert steps
            first.lender.recall()
            await until(lambda: not first.pool.lent)
            assert not steps  # what was recorded would go on to poll
            return [*found[0], *found[1]]

    check(path, [*asked, *asked], asyncio.run(serve()))
