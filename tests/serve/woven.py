"""Many requests at a hot unit, while the share changes, and its cold one recalls, dies and comes again:
`python -m tests.serve.woven 500` serves that many of three model families, and compares every token with the
oracle's. Real engines; the cold ones are processes of their own."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvloom.engine.engine import Engine
from kvloom.types.errors import KvloomError
from tests.checkpoints import VOCAB, make_checkpoint
from tests.engines import ask, body, spec_of
from tests.oracle import Oracle
from tests.weaving import MODEL, PAGES, ColdUnit, cold_unit, until, weaving

FAMILIES = ("qwen2", "gemma2", "gpt2")  # straight layers; windows and bent scores; transformers' own modules
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
AT_ONCE = 12
LONGEST = 50  # times the requests that are asked for, until all has happened at least once
POOL = 1 << 20  # of the hot unit: a third of what AT_ONCE of the longest need


@dataclass
class Tally:
    """What has happened. away: tokens attended for by a cold unit; shares: how often the share was set; cold:
    own tokens of the cold units."""

    requests: int = 0
    tokens: int = 0
    away: int = 0
    shares: int = 0
    recalls: int = 0
    kills: int = 0
    preempted: int = 0
    cold: int = 0
    ties: int = 0
    found: list[tuple[list[int], list[int]]] = field(default_factory=list)  # prompts and answers
    colds: list[tuple[list[int], list[int]]] = field(default_factory=list)  # the cold units' own


class Woven:
    """One family's hot unit, and the cold units that it has, one after the other."""

    def __init__(self, hot: Engine, cold: Path, seed: str, stack: ExitStack) -> None:
        self.tally = Tally()
        self._hot = hot
        self._path = cold
        self._dice = random.Random(seed)
        self._stack = stack
        self._places = asyncio.Semaphore(AT_ONCE)
        self._cold = self._started()
        self._over = False

    def _started(self) -> ColdUnit:
        return self._stack.enter_context(cold_unit(self._path))

    async def serve(self, count: int) -> None:
        """So many requests and, as long as something has not happened yet, more: a slow machine has fewer
        turns in the same. Each is checked when all are over."""
        await self._cold.call("begin")
        stirring = asyncio.create_task(self._stir())
        async with asyncio.TaskGroup() as group:
            for number in range(LONGEST * count):
                if number >= count and await self._has_seen_all():
                    break
                await self._places.acquire()
                await until(lambda: self._hot.borrower.loan(MODEL) is not None, tries=60_000)
                group.create_task(self._one())
        self._over = True
        await stirring
        self.tally.colds += await self._cold.call("found", least=1)
        self._hot.borrower.give_back_all()
        while await self._cold.call("check"):  # noqa: ASYNC110 -- it is another process
            await asyncio.sleep(0.001)
        load = await self._hot.load()
        self.tally.away = load.models[MODEL].away_tokens_total
        self.tally.preempted = load.models[MODEL].preemptions_total

    async def _has_seen_all(self) -> bool:
        tally, load = self.tally, (await self._hot.load()).models[MODEL]
        happened = (tally.shares, tally.recalls, tally.kills, load.preemptions_total, load.away_tokens_total)
        return min(happened) > 0

    async def _one(self) -> None:
        length, count = self._dice.choice((1, 3, 17, 40, 90)), self._dice.choice((4, 24, 48))
        prompt = [self._dice.randrange(VOCAB) for _ in range(length)]
        answer = await ask(self._hot, body(MODEL, prompt, max_tokens=count))
        self._places.release()
        assert len(answer.tokens[0]) == count, answer.ends
        self.tally.found.append((prompt, answer.tokens[0]))
        self.tally.requests += 1
        self.tally.tokens += count

    async def _stir(self) -> None:
        """Something else after every few of the hot unit's steps."""
        for turn in itertools.count():
            if self._over:
                return
            await self._borrow()
            if turn % 30 == 8:
                self.tally.kills += 1
                self._cold.process.kill()
                self._cold = self._started()
                await self._cold.call("begin")
            elif turn % 11 == 3:
                self.tally.recalls += 1
                self.tally.colds += await self._cold.call("found")
                await self._cold.call("recall")
            else:
                with suppress(KvloomError):  # it has ended meanwhile
                    self._hot.borrower.set_share(MODEL, self._dice.choice(SHARES))
                    self.tally.shares += 1
            await self._steps(self._dice.choice((1, 2, 6)))

    async def _borrow(self) -> None:
        if self._hot.borrower.loan(MODEL) is None:
            terms = self._hot.borrower.terms(MODEL, self._dice.choice((8, 2 * PAGES)))
            with suppress(KvloomError):  # the last loan is not back yet
                self._hot.borrower.borrow(terms, await self._cold.lend(terms), self._dice.choice(SHARES))

    async def _steps(self, count: int) -> None:
        """Wait for so many of the hot unit, or until it has no loan."""
        end = await self._decoded() + count
        loan = self._hot.borrower.loan
        while loan(MODEL) and not self._over and await self._decoded() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def _decoded(self) -> int:
        return (await self._hot.load()).models[MODEL].decode_jobs_total


async def served(hot: Path, cold: Path, count: int, seed: str) -> Tally:
    with ExitStack() as stack:
        async with weaving(spec_of({MODEL: hot}, threads=1, kv_bytes=POOL), patience=20.0) as engine:
            woven = Woven(engine, cold, seed, stack)
            await woven.serve(count)
    return woven.tally


def run(count: int, families: Sequence[str], folder: Path) -> dict[str, Tally]:
    """By family. Raises AssertionError where a token is not the oracle's, or a pool lacks blocks."""
    cold, found = make_checkpoint(folder / "cold", "llama", seed=1), dict[str, Tally]()
    other = Oracle(cold)
    for i, family in enumerate(families):
        path = make_checkpoint(folder / family, family)
        tally = asyncio.run(
            served(path, cold, count * (i + 1) // len(families) - count * i // len(families), family)
        )
        oracle = Oracle(path)
        for prompt, tokens in tally.found:
            oracle.check_at_once(prompt, tokens)
        for prompt, tokens in tally.colds:
            other.check_at_once(prompt, tokens)
            tally.cold += len(tokens)
        tally.ties = oracle.ties
        found[family] = tally
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for family, tally in run(int(sys.argv[1]), FAMILIES, Path(folder)).items():
            print(
                f"{family}: {tally.requests} requests, {tally.tokens} tokens, {tally.away} of them away; "
                f"{tally.cold} tokens of the cold units' own; "
                f"{tally.shares} changes of the share, {tally.recalls} recalls, {tally.kills} kills, "
                f"{tally.preempted} preemptions; {tally.ties} ties"
            )


if __name__ == "__main__":
    main()
