"""Either side dies at each point of what the two do together: the cold one here, then the hot one."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvloom.engine.engine import Engine
from kvloom.offload.cpu.attention import RemoteAttention
from kvloom.offload.memory.borrower import BorrowedBlocks, TaskSender
from kvloom.types.errors import Conflict, Unavailable
from kvloom.types.verbs import Prefix
from tests.checkpoints import make_checkpoint
from tests.engines import ask, body, spec_of
from tests.oracle import Oracle
from tests.standing import standing, terms_of
from tests.weaving import MODEL, PAGES, ColdUnit, cold_unit, until, weaving, woven_of

COUNT = 16
PROMPTS = [[i, 5, 7] * 9 for i in range(5)]
WAITED_FOR, WAITING, BACK = "before one is waited for", "while it is waited for", "as one comes back"
Kill = Callable[[], None]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("faults")
    return make_checkpoint(folder / "hot", "qwen2"), make_checkpoint(folder / "cold", "llama", seed=3)


def before(target: type, method: str, nth: int) -> Callable[[pytest.MonkeyPatch, Kill], None]:
    """Kill just before the n-th call."""

    def arm(patch: pytest.MonkeyPatch, kill: Kill) -> None:
        real, calls = getattr(target, method), 0

        def called(self: Any, *arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == nth:
                kill()
            return real(self, *arguments)

        patch.setattr(target, method, called)

    return arm


def stop(process: Any) -> None:
    """The process stands still when this returns: it attends to no task that comes."""
    os.kill(process.pid, signal.SIGSTOP)
    state = Path(f"/proc/{process.pid}/stat")
    while state.read_text().rpartition(")")[2].split()[0] != "T":
        os.sched_yield()


POINTS = {
    "before the first copy": before(BorrowedBlocks, "put", 1),
    "before a later one": before(BorrowedBlocks, "put", 4),
    "before a task descriptor": before(TaskSender, "begin", 3),
    "before a step's tasks": before(RemoteAttention, "enter", 3),
    WAITED_FOR: before(TaskSender, "collect", 1),
    WAITING: before(RemoteAttention, "enter", 3),
    BACK: before(BorrowedBlocks, "take", 1),
}


def test_a_cold_unit_that_dies_costs_no_token(paths: tuple[Path, Path]) -> None:
    """At each point another one does; the hot one serves on."""

    async def at(point: str, hot: Engine, cold: ColdUnit) -> list[list[int]]:
        def kill() -> None:
            if point == WAITING:  # it dies a moment later: nobody wakes who waits
                stop(cold.process)
                threading.Timer(0.05, cold.process.kill).start()
            else:
                cold.process.kill()
                cold.process.join()

        with pytest.MonkeyPatch.context() as patch:
            if point == WAITED_FOR:  # the kernel waits in vain, and leaves it to the host
                before(RemoteAttention, "enter", 3)(patch, lambda: stop(cold.process))
            POINTS[point](patch, kill)
            terms = hot.borrower.terms(MODEL, PAGES)
            hot.borrower.borrow(terms, await cold.lend(terms), 1.0)
            asked = [asyncio.create_task(ask(hot, body(MODEL, p, max_tokens=COUNT))) for p in PROMPTS]
            if point == BACK:
                await until(lambda: woven_of(hot).tokens > 10)
                hot.borrower.set_share(MODEL, 0.0)
            answers = await asyncio.gather(*asked)
        assert hot.borrower.loan(MODEL) is None, point
        hot.pool.check()
        return [answer.tokens[0] for answer in answers]

    async def serve() -> list[list[int]]:
        found: list[list[int]] = []
        async with weaving(spec_of({MODEL: paths[0]}, threads=1)) as hot:
            for point in POINTS:
                with cold_unit(paths[1]) as cold:
                    found += await at(point, hot, cold)
                await hot.evict(Prefix(model=MODEL, prompt=[]))
        return found

    oracle = Oracle(paths[0])
    for prompt, tokens in zip(PROMPTS * len(POINTS), asyncio.run(serve()), strict=True):
        assert len(tokens) == COUNT
        oracle.check_at_once(prompt, tokens)


def test_a_cold_unit_that_dies_when_it_has_lent_is_not_borrowed_from(paths: tuple[Path, Path]) -> None:
    async def serve() -> list[int]:
        with cold_unit(paths[1]) as cold:
            async with weaving(spec_of({MODEL: paths[0]}, threads=1)) as hot:
                terms = hot.borrower.terms(MODEL, PAGES)
                loan = await cold.lend(terms)
                cold.process.kill()
                cold.process.join()
                with pytest.raises(Unavailable, match=r"cannot be reached|is gone"):
                    hot.borrower.borrow(terms, loan, 1.0)
                return (await ask(hot, body(MODEL, PROMPTS[0], max_tokens=COUNT))).tokens[0]

    Oracle(paths[0]).check_at_once(PROMPTS[0], asyncio.run(serve()))


def test_a_hot_unit_that_dies_leaves_the_cold_one_its_blocks(paths: tuple[Path, Path]) -> None:
    """At each point; then the cold one lends again, and answers as ever."""

    async def serve() -> list[int]:
        async with weaving(spec_of({"cold": paths[1]}, threads=1)) as cold:
            for point in ("lent", "borrowed", "copies", "told", "posted", "answered", "left"):
                async with standing(cold, point) as hot:
                    if point == "left":
                        await until(lambda: not cold.pool.lent)
                        continue
                    assert cold.pool.lent, point
                    if point == "copies":
                        cold.lender.recall()
                        assert cold.pool.lent
                    hot.kill()
                    await until(lambda: not cold.pool.lent)
                    cold.pool.check()
            return (await ask(cold, body("cold", PROMPTS[0], max_tokens=COUNT))).tokens[0]

    Oracle(paths[1]).check_at_once(PROMPTS[0], asyncio.run(serve()))


def test_blocks_come_back_from_a_hot_unit_that_stands_still(paths: tuple[Path, Path]) -> None:
    """But not while it is at a copy: it may go on with that."""

    async def serve() -> None:
        async with weaving(spec_of({"cold": paths[1]}, threads=1)) as cold:
            async with standing(cold, "posted") as hot:
                os.kill(hot.pid, signal.SIGSTOP)
                cold.lender.recall()
                assert not cold.pool.lent
            async with standing(cold, "copies") as hot:
                os.kill(hot.pid, signal.SIGSTOP)
                cold.lender.recall()
                with pytest.raises(Conflict, match="the last loan is not back yet"):
                    cold.lender.lend(terms_of(cold, hot.pid))
                hot.kill()
                await until(lambda: not cold.pool.lent)

    asyncio.run(serve())
