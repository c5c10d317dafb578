"""Who is away, for how long, and what becomes of them: a hot and a cold engine beside each other."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvloom.engine.engine import Engine
from kvloom.offload.cpu.attention import CpuLoans, ForwardOffload
from kvloom.offload.terms import Borrow
from kvloom.types.address import KVForm
from kvloom.types.errors import BadRequest, Conflict, OutOfBlocks
from kvloom.types.job import Job, OffloadedRows
from kvloom.types.load import Waits
from tests.checkpoints import VOCAB, make_checkpoint
from tests.engines import Answer, ask, body, spec_of
from tests.kv.trees import longest, nodes
from tests.oracle import Oracle
from tests.weaving import MODEL, PAGES, until, weaving, woven_of

COUNT = 20
FAMILIES = ("qwen2", "gemma2", "gpt2")  # straight layers; windows and bent scores; transformers' own modules


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """By family, a hot model, and a cold one of another geometry."""
    folder = tmp_path_factory.mktemp("woven")
    cold = make_checkpoint(folder / "cold", "llama", seed=1)
    return {family: (make_checkpoint(folder / family, family), cold) for family in FAMILIES}


@pytest.fixture
def paths(checkpoints: dict[str, tuple[Path, Path]]) -> tuple[Path, Path]:
    return checkpoints["qwen2"]


@asynccontextmanager
async def pair(paths: tuple[Path, Path], hot_bytes: int = 4 << 20) -> AsyncIterator[tuple[Engine, Engine]]:
    """Hot and cold."""
    async with (
        weaving(spec_of({"cold": paths[1]}, threads=1)) as cold,
        weaving(spec_of({MODEL: paths[0]}, threads=1, kv_bytes=hot_bytes)) as hot,
    ):
        yield hot, cold


def lend(hot: Engine, cold: Engine, share: float, pages: int = PAGES) -> None:
    terms = hot.borrower.terms(MODEL, pages)
    hot.borrower.borrow(terms, cold.lender.lend(terms), share)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.choice((1, 3, 17, 33, 60)))] for _ in range(count)]


def check(path: Path, asked: list[list[int]], answers: list[Answer]) -> None:
    oracle = Oracle(path)
    for prompt, answer in zip(asked, answers, strict=True):
        assert len(answer.tokens[0]) == COUNT
        oracle.check_at_once(prompt, answer.tokens[0])


async def generate(hot: Engine, asked: list[list[int]]) -> list[Answer]:
    return await asyncio.gather(*(ask(hot, body(MODEL, p, max_tokens=COUNT)) for p in asked))


async def stir(hot: Engine, rng: random.Random) -> None:
    """Another share after every frame of a request."""
    async for _ in hot.start_generate(body(MODEL, [1, 2], max_tokens=4 * COUNT)):
        hot.borrower.set_share(MODEL, rng.choice((0.0, 0.2, 0.5, 0.8, 1.0)))


@pytest.mark.parametrize("family", FAMILIES)
def test_calling_back_and_sending_away_at_any_step_changes_no_token(
    checkpoints: dict[str, tuple[Path, Path]], family: str
) -> None:
    paths = checkpoints[family]
    asked = prompts(16, len(family))

    async def serve() -> list[Answer]:
        async with pair(paths) as (hot, cold):
            lend(hot, cold, 0.5)
            answers, _ = await asyncio.gather(generate(hot, asked), stir(hot, random.Random(family)))
            woven = woven_of(hot)
            assert min(woven.went, woven.came) > 10
            assert woven.count == 0
            woven.pool.check()
            return answers

    check(paths[0], asked, asyncio.run(serve()))


def test_who_goes_away_and_comes_back_keeps_its_salt(paths: tuple[Path, Path]) -> None:
    """What it leaves in the cache at home is for its own salt."""
    asked = prompts(16)

    async def serve() -> list[Answer]:
        async with pair(paths) as (hot, cold):
            lend(hot, cold, 0.5)
            bodies = [replace(body(MODEL, p, max_tokens=COUNT), salt="alice") for p in asked]
            answers = asyncio.gather(*(ask(hot, one) for one in bodies))
            await asyncio.gather(answers, stir(hot, random.Random(1)))
            assert min(woven_of(hot).went, woven_of(hot).came) > 10
            tree = hot.pool.caches[MODEL].prefixes
            assert {path[:2] for path, _ in nodes(tree, "")} == {(1, 2)}  # of who stirs
            assert all(longest(tree, p, "alice") == len(p) for p in asked)
            return await answers

    check(paths[0], asked, asyncio.run(serve()))


def test_all_are_away_and_none_is_at_home(paths: tuple[Path, Path]) -> None:
    asked = prompts(6)

    async def serve() -> list[Answer]:
        async with pair(paths) as (hot, cold):
            lend(hot, cold, 1.0, pages=100)
            answers = await generate(hot, asked)
            assert woven_of(hot).tokens >= len(asked) * (COUNT - 1) - 15  # they go one after the other
            return answers

    check(paths[0], asked, asyncio.run(serve()))


def test_where_nobody_is_away_a_step_is_like_any_other(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise AssertionError("the loan has been used")

    monkeypatch.setattr(CpuLoans, "offloaded", fails)
    asked = prompts(3)

    async def serve() -> list[Answer]:
        async with pair(paths) as (hot, cold):
            lend(hot, cold, 0.0)
            return await generate(hot, asked)

    check(paths[0], asked, asyncio.run(serve()))


def test_a_short_loan_sends_back_who_does_not_fit(paths: tuple[Path, Path]) -> None:
    asked = prompts(8, seed=4)

    async def serve() -> list[Answer]:
        async with pair(paths) as (hot, cold):
            lend(hot, cold, 1.0, pages=9)
            answers = await generate(hot, asked)
            assert min(woven_of(hot).went, woven_of(hot).came) > 0
            return answers

    check(paths[0], asked, asyncio.run(serve()))


def test_a_hot_pool_of_one_request_serves_more_at_once(paths: tuple[Path, Path]) -> None:
    asked = [[i, 2, 3] * 12 for i in range(6)]

    async def most(share: float) -> tuple[int, list[Answer]]:
        """Sequences that ran at once."""
        seen = 0
        async with pair(paths, hot_bytes=12 * 2048 * 6) as (hot, cold):
            lend(hot, cold, share, pages=60)
            tasks = [asyncio.create_task(ask(hot, body(MODEL, p, max_tokens=COUNT))) for p in asked]
            while not all(task.done() for task in tasks):
                await asyncio.wait(tasks, timeout=0.001)
                seen = max(seen, (await hot.load()).running)
            return seen, [task.result() for task in tasks]

    alone, answers = asyncio.run(most(0.0))
    check(paths[0], asked, answers)
    woven, answers = asyncio.run(most(1.0))
    check(paths[0], asked, answers)
    assert woven > alone


@pytest.mark.parametrize("when", [1, 3, 12])
def test_the_cold_unit_wants_its_blocks_back(paths: tuple[Path, Path], when: int) -> None:
    asked = prompts(6, seed=when)

    async def serve() -> list[Answer]:
        async with pair(paths) as (hot, cold):
            lend(hot, cold, 1.0)

            async def recall() -> None:
                frames = 0
                async for _ in hot.start_generate(body(MODEL, [5], max_tokens=COUNT)):
                    frames += 1
                    if frames == when:
                        cold.lender.recall()

            answers, _ = await asyncio.gather(generate(hot, asked), recall())
            assert hot.borrower.loan(MODEL) is None
            await until(lambda: cold.pool.lent == 0)  # it hears of it a moment later
            lend(hot, cold, 1.0)  # and lends again
            await generate(hot, asked[:1])
            return answers

    check(paths[0], asked, asyncio.run(serve()))


def test_a_step_that_fails_ends_the_loan(paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that it has posted may be done at any time, in blocks that others would have by then."""
    asked, steps = prompts(4), 0
    real = CpuLoans.offloaded

    def fails_once(self: CpuLoans, job: Job, rows: OffloadedRows) -> ForwardOffload:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise RuntimeError("a broken kernel")
        return real(self, job, rows)

    monkeypatch.setattr(CpuLoans, "offloaded", fails_once)

    async def test() -> None:
        async with pair(paths) as (hot, cold):
            lend(hot, cold, 1.0)
            failed = await generate(hot, asked)
            assert {end.reason for answer in failed for end in answer.ends.values()} == {"error"}
            assert hot.borrower.loan(MODEL) is None
            await until(lambda: cold.pool.lent == 0)
            lend(hot, cold, 1.0)
            check(paths[0], asked, await generate(hot, asked))

    asyncio.run(test())


def test_a_request_that_is_aborted_while_it_is_away_leaves_nothing(paths: tuple[Path, Path]) -> None:
    async def serve() -> None:
        async with pair(paths) as (hot, cold):
            lend(hot, cold, 1.0)
            request = body(MODEL, [1, 2, 3] * 9, max_tokens=200)
            async for frame in hot.start_generate(request):
                if frame and woven_of(hot).count:
                    await hot.abort(request.request)
            woven = woven_of(hot)
            await until(lambda: not woven.count)  # the step under way has to land
            assert woven.went == 1
            woven.pool.check()
            assert woven.pool.available == woven.pool.total

    asyncio.run(serve())


def test_a_request_that_stands_still_while_it_is_away_goes_on(paths: tuple[Path, Path]) -> None:
    async def serve() -> list[Answer]:
        async with pair(paths) as (hot, cold):
            lend(hot, cold, 1.0)
            request, answer = body(MODEL, [4, 5] * 12, max_tokens=COUNT), Answer()
            held = False
            async for frame in hot.start_generate(request):
                answer.take(frame)
                if not held and woven_of(hot).tokens > 4:
                    held = True
                    await hot.hold(request.request)
                    assert woven_of(hot).count == 0
                    await hot.resume(request.request)
            assert woven_of(hot).went == 2
            return [answer]

    check(paths[0], [[4, 5] * 12], asyncio.run(serve()))


def test_choices_that_share_a_prompt_go_away_one_by_one(paths: tuple[Path, Path]) -> None:
    prompt = [9, 8, 7] * 8

    async def serve() -> Answer:
        async with pair(paths) as (hot, cold):
            lend(hot, cold, 0.5)
            answer = await ask(hot, body(MODEL, prompt, n=4, max_tokens=COUNT))
            assert 0 < woven_of(hot).went < 4
            return answer

    answer = asyncio.run(serve())
    oracle = Oracle(paths[0])
    for choice in range(4):
        oracle.check_at_once(prompt, answer.tokens[choice])


def test_what_is_lent_is_promised(paths: tuple[Path, Path]) -> None:
    async def serve() -> None:
        async with pair(paths) as (hot, cold):
            whole = cold.pool.total // hot.pool.caches[MODEL].geometry.blocks_per_page
            with pytest.raises(OutOfBlocks, match=r"lend: .* would be promised"):
                cold.lender.lend(hot.borrower.terms(MODEL, whole))
            lend(hot, cold, 0.5)
            with pytest.raises(Conflict, match="lends already"):
                cold.lender.lend(hot.borrower.terms(MODEL, 1))
            cold.pool.check()

    asyncio.run(serve())


@pytest.mark.parametrize(
    "change", [{"block_bytes": 1 << 14}, {"tokens_per_block": 64}, {"dtype": "bfloat16"}, {"head_dim": 8}]
)
def test_a_form_that_is_not_of_these_blocks_is_refused(
    paths: tuple[Path, Path], change: dict[str, int | str]
) -> None:
    """Else a token's place would lie outside of the block that was lent for it."""

    async def serve() -> None:
        async with weaving(spec_of({"cold": paths[1]}, threads=1)) as cold:
            form = replace(KVForm.of(cold.pool.caches["cold"].geometry, "float32"), **change)
            terms = Borrow(model="m", pid=os.getpid(), form=form, heads=4, rows=2, width=2, pages=2)
            with pytest.raises(BadRequest, match="cannot be exchanged"):
                cold.lender.lend(terms)
            assert cold.pool.lent == 0

    asyncio.run(serve())


@pytest.mark.parametrize(
    ("family", "terms"),
    [
        ("llama", {"control": "iterations", "split": "none"}),
        ("qwen3", {"split": "none"}),
        ("mistral", {"waits": 0.001}),
        ("gemma2", {"waits": 0.001}),
    ],
)
def test_tokens_of_both_are_their_own(family: str, terms: dict[str, Any], tmp_path: Path) -> None:
    """The family is the cold unit's, which polls."""
    hot_path = make_checkpoint(tmp_path / "hot", "qwen2")
    cold_path = make_checkpoint(tmp_path / "cold", family)
    asked = prompts(8, len(family))

    async def serve() -> tuple[list[Any], list[Any], Waits | None]:
        async with pair((hot_path, cold_path)) as (hot, cold):
            wanted = replace(hot.borrower.terms(MODEL, PAGES), **terms)
            hot.borrower.borrow(wanted, cold.lender.lend(wanted), 0.6)
            own = asyncio.gather(*(ask(cold, body("cold", p, max_tokens=COUNT)) for p in asked))
            answers, others = await asyncio.gather(generate(hot, asked), own)
            assert woven_of(hot).tokens > COUNT
            return answers, others, (await cold.load()).waits

    answers, others, waits = asyncio.run(serve())
    check(hot_path, asked, answers)
    check(cold_path, asked, others)
    assert waits is not None
    assert waits.tasks_total >= COUNT
    assert waits.wait > 0
    assert waits.service > 0
    assert (waits.parts == 1) == (terms.get("control") == "iterations")  # a forward is one operator


def test_nothing_is_told_of_waits_where_nothing_is_lent(tmp_path: Path) -> None:
    paths = make_checkpoint(tmp_path / "hot", "qwen2"), make_checkpoint(tmp_path / "cold", "llama")

    async def serve() -> None:
        async with pair(paths) as (hot, cold):
            assert (await cold.load()).waits is None
            terms = hot.borrower.terms(MODEL, 4)
            with pytest.raises(BadRequest):
                cold.lender.lend(replace(terms, heads=terms.heads + 1))
            cold.lender.lend(terms)
            waits = (await cold.load()).waits
            assert waits is not None
            assert waits.tasks_total == 0

    asyncio.run(serve())
