"""Sequences that go away and come home at random, over a device made of arithmetic: every page holds what it
should, nobody goes before who is less urgent, and a step that fails costs no other."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvloom.types.request import StartGenerate
from tests.engine.modelled_weaving import MODEL, borrow, hot_unit
from tests.engine.plays import check, order, serve
from tests.engines import Answer
from tests.modelled import ask, turns


class Stirred:
    """Requests that come, a share that changes, a loan that ends and is made again, all at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        losing = frozenset(self.random.sample(range(1, 60), self.random.choice((0, 1, 4))))
        failing = frozenset(self.random.sample(range(20, 120), self.random.choice((0, 0, 2))))
        self.lent = self.random.choice((5, 12, 40))
        self.engine, self.executor = hot_unit(
            self.random.choice((26, 32, 60)), self.lent, seed=seed, losing=losing, failing=failing
        )
        self.asked: list[tuple[StartGenerate, asyncio.Task[Answer]]] = []
        self.aborted: set[str] = set()

    async def play(self) -> None:
        stirring = asyncio.create_task(self._stir())
        for i in range(24):
            body = order(
                f"r{i}",
                MODEL,
                self.random.choice((1, 7, 16, 40, 60)),
                n=self.random.choice((1, 1, 2)),
                priority=self.random.choice((0, 0, 1)),
                max_tokens=self.random.choice((1, 8, 30)),
            )
            self.asked.append((body, asyncio.create_task(ask(self.engine, body))))
            await turns(self.random.choice((0, 5, 40)))
        await asyncio.gather(*(task for _, task in self.asked))
        assert not stirring.done()
        stirring.cancel()

    async def _stir(self) -> None:
        while True:
            woven, roll = self.engine.borrower.loan(MODEL), self.random.random()
            if woven is None:
                woven = borrow(self.engine, self.random.random(), self.lent)
            elif roll < 0.4:
                self.engine.borrower.set_share(MODEL, self.random.choice((0.0, 0.3, 0.7, 1.0)))
            elif roll < 0.45:
                self.engine.borrower.withdraw(MODEL)
            elif roll < 0.5 and self.asked:
                body, task = self.random.choice(self.asked)
                if not task.done():
                    self.aborted.add(body.request)
                    await self.engine.abort(body.request)
            woven.pool.check()
            await turns(self.random.choice((1, 3, 10)))


@pytest.mark.parametrize("seed", range(30))
def test_whatever_moves_the_tokens_are_those_of_a_lone_request(seed: int) -> None:
    stirred = Stirred(seed)
    serve(stirred.play(), stirred.engine, stirred.executor)
    for body, task in stirred.asked:
        failed = any(end.reason == "error" for end in task.result().ends.values())
        whole = not failed and body.request not in stirred.aborted
        check(stirred.executor, body, task.result(), whole=whole)
