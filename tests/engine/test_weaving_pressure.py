"""The cold unit's own models come first: what they need of a loan they have back. And it is known who is
away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from msgspec import structs

from kvloom.engine.engine import Engine
from kvloom.engine.freeness import freeness, virtual_usage
from kvloom.offload.loan_manager import LoanManager
from kvloom.offload.policy import STEP
from kvloom.types.address import Ticket
from kvloom.types.clock import WallClock
from kvloom.types.errors import BadRequest, Conflict, OutOfBlocks
from kvloom.types.spec import WeaveSpec
from kvloom.types.verbs import Offer
from tests.checkpoints import make_checkpoint
from tests.cluster.loads import model, unit
from tests.engines import Answer, ask, body, spec_of
from tests.oracle import Oracle
from tests.weaving import MODEL, until, weaving, woven_of

COUNT = 40


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A hot model, and a cold one."""
    folder = tmp_path_factory.mktemp("pressed")
    return make_checkpoint(folder / "hot", "qwen2"), make_checkpoint(folder / "cold", "llama", seed=1)


@asynccontextmanager
async def pair(
    paths: tuple[Path, Path], hot_bytes: int = 4 << 20, cold_bytes: int = 4 << 20
) -> AsyncIterator[tuple[Engine, Engine]]:
    async with (
        weaving(spec_of({"cold": paths[1]}, threads=1, kv_bytes=cold_bytes)) as cold,
        weaving(spec_of({MODEL: paths[0]}, threads=1, kv_bytes=hot_bytes)) as hot,
    ):
        yield hot, cold


def pages_of(cold: Engine, hot: Engine, most: float) -> int:
    """Of the hot model, in a part of the cold pool."""
    return int(cold.pool.total * most) // hot.pool.caches[MODEL].geometry.blocks_per_page


def lend(hot: Engine, cold: Engine, share: float, pages: int) -> None:
    terms = hot.borrower.terms(MODEL, pages)
    hot.borrower.borrow(terms, cold.lender.lend(terms), share)


def check(path: Path, prompt: list[int], answer: Answer) -> None:
    assert len(answer.tokens[0]) == COUNT
    Oracle(path).check_at_once(prompt, answer.tokens[0])


def test_own_models_that_wait_have_back_what_is_lent(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cold pool holds ten of its requests; half is lent. Nobody hears that a part would be enough."""
    monkeypatch.setattr("kvloom.offload.loans.PATIENCE", 0.0)
    hot_prompts = [[i, 4, 5] * 6 for i in range(3)]
    cold_prompts = [[i, 7] * 40 for i in range(12)]

    async def serve() -> tuple[list[Answer], list[Answer]]:
        async with pair(paths, cold_bytes=1 << 20) as (hot, cold):
            lend(hot, cold, 1.0, pages_of(cold, hot, 0.4))
            lent = cold.pool.lent
            assert virtual_usage(await cold.load()) == lent > 0
            hots = [asyncio.create_task(ask(hot, body(MODEL, p, max_tokens=COUNT))) for p in hot_prompts]
            await until(lambda: woven_of(hot).tokens > 3)
            assert cold.pool.lent == lent  # nobody waits here
            colds = await asyncio.gather(
                *(ask(cold, body("cold", p, max_tokens=COUNT)) for p in cold_prompts)
            )
            assert cold.pool.lent == 0
            answers = await asyncio.gather(*hots)
            with pytest.raises(OutOfBlocks, match="have needed the blocks; ask again in"):
                cold.lender.lend(hot.borrower.terms(MODEL, 3))
            return answers, colds

    answers, colds = asyncio.run(serve())
    for prompt, answer in zip(hot_prompts, answers, strict=True):
        check(paths[0], prompt, answer)
    for prompt, answer in zip(cold_prompts, colds, strict=True):
        check(paths[1], prompt, answer)


def test_own_models_have_back_a_part_if_that_is_enough(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was offloaded there is computed again, what was offloaded elsewhere stays, and all tokens are
    those of the models alone."""
    monkeypatch.setattr("kvloom.offload.loans.PATIENCE", 60.0)
    hot_prompts = [[i, 4, 5] * 6 for i in range(6)]
    cold_prompts = [[i, 7] * 40 for i in range(8)]

    async def serve() -> tuple[list[Answer], list[Answer]]:
        async with pair(paths, cold_bytes=1 << 20) as (hot, cold):
            lend(hot, cold, 1.0, pages_of(cold, hot, 0.4))
            lent, loan = cold.pool.lent, woven_of(hot)
            hots = [asyncio.create_task(ask(hot, body(MODEL, p, max_tokens=COUNT))) for p in hot_prompts]
            await until(lambda: loan.tokens > 3)
            colds = [asyncio.create_task(ask(cold, body("cold", p, max_tokens=COUNT))) for p in cold_prompts]
            await until(lambda: cold.lender.recalled > 0)
            wanted = (await cold.load()).recalled_blocks
            back = await hot.borrower.shed(MODEL, wanted)
            assert back is not None
            assert lent > len(back.blocks) >= wanted
            await cold.take_back(back)
            await cold.take_back(back)  # and again: it changes nothing
            assert cold.pool.lent == lent - len(back.blocks) == loan.pool.total - loan.pool.lent
            assert woven_of(hot) is loan
            with pytest.raises(Conflict, match="this loan is over"):
                await cold.take_back(structs.replace(back, ticket=Ticket(7, 7)))
            with pytest.raises(BadRequest, match="a block beyond the"):
                await cold.take_back(structs.replace(back, blocks=[lent]))
            with pytest.raises(BadRequest, match="all blocks of the loan"):
                await cold.take_back(structs.replace(back, blocks=list(range(lent))))
            answers = await asyncio.gather(*hots), await asyncio.gather(*colds)
            loan.pool.check()
            return answers

    answers, colds = asyncio.run(serve())
    for prompt, answer in zip(hot_prompts, answers, strict=True):
        check(paths[0], prompt, answer)
    for prompt, answer in zip(cold_prompts, colds, strict=True):
        check(paths[1], prompt, answer)


def test_a_share_that_adapts_rises_where_blocks_are_short_and_ends_with_the_loan(
    paths: tuple[Path, Path],
) -> None:
    """The lender has nothing to do, so nothing but the need counts."""

    async def serve() -> list[tuple[list[int], Answer]]:
        async with pair(paths, hot_bytes=12 * 2048 * 6) as (hot, cold), asyncio.TaskGroup() as group:
            spec = WeaveSpec("unit-1", "auto", 0.3)
            manager = LoanManager(hot.borrower, MODEL, spec, {"unit-1": cold}, WallClock(), freeness)
            borrower = group.create_task(manager.run())
            await until(lambda: hot.borrower.loan(MODEL) is not None)
            assert woven_of(hot).share == 0
            ends, answers = False, list[tuple[list[int], Answer]]()

            async def load(own: int) -> None:
                """The pool holds two of these."""
                prompt = [own, 4] * 30
                while not ends:
                    answers.append((prompt, await ask(hot, body(MODEL, prompt, max_tokens=COUNT))))

            clients = [group.create_task(load(own)) for own in range(8)]
            await until(lambda: woven_of(hot).share >= 2 * STEP)
            ends = True
            await asyncio.gather(*clients)
            old = woven_of(hot)
            cold.lender.recall()
            await until(lambda: hot.borrower.loan(MODEL) not in (None, old))
            assert woven_of(hot).share == 0
            borrower.cancel()
            with suppress(asyncio.CancelledError):
                await borrower
            return answers

    answers = asyncio.run(serve())
    for prompt, answer in answers[:: max(1, len(answers) // 8)]:
        check(paths[0], prompt, answer)


def test_who_is_at_home_is_offered_before_who_is_away(paths: tuple[Path, Path]) -> None:
    async def serve() -> None:
        async with pair(paths) as (hot, cold):
            lend(hot, cold, 1.0, pages_of(cold, hot, 0.3))
            woven_of(hot).policy.rows = 1  # no other goes
            offer = Offer(destination=unit(model(size=4), names=[MODEL], blocks=100_000))
            away, home = (body(MODEL, [7] * n, max_tokens=4 * COUNT) for n in (3, 60))
            task = asyncio.create_task(ask(hot, away))
            await until(lambda: woven_of(hot).count == 1)
            assert (await hot.offer(offer)).request == away.request  # better than nobody
            frames = 0
            async for _ in hot.start_generate(home):
                frames += 1
                if frames == 3:
                    assert woven_of(hot).count == 1
                    assert (await hot.offer(offer)).request == home.request  # though it is longer
            await task

    asyncio.run(serve())
