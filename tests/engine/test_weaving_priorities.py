"""Where blocks are short, at home or away, the less urgent give way, wherever they are."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.sequence import Sequence
from tests.engine.plays import check, order, serve
from tests.modelled import ask, turns
from tests.modelled_weaving import MODEL, borrow, hot_unit


@pytest.mark.parametrize("seed", range(12))
def test_no_urgent_one_is_computed_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of sixteen are urgent, and the shortest, so that the others together always make room for them."""
    dice, gone = random.Random(seed), list[tuple[Sequence, bool]]()
    real = ModelQueue.put_back

    def put_back(self: ModelQueue, sequence: Sequence, now: int) -> None:
        gone.append((sequence, self.is_here(sequence)))
        real(self, sequence, now)

    monkeypatch.setattr(ModelQueue, "put_back", put_back)
    lent = dice.choice((20, 30))
    engine, executor = hot_unit(dice.choice((30, 40)), lent, seed=seed)

    async def one(i: int) -> None:
        urgent = i % 4 == 1
        length, count = (8, 40) if urgent else (dice.choice((24, 30)), 50)
        body = order(f"{'r' * (i + 1)}", MODEL, length, priority=0 if urgent else 1, max_tokens=count)
        check(executor, body, await ask(engine, body), whole=True)

    async def play() -> None:
        borrow(engine, dice.choice((0.3, 0.6, 1.0)), lent)
        asked = []
        for i in range(16):
            asked.append(asyncio.create_task(one(i)))
            await turns(dice.choice((0, 30)))
        await asyncio.gather(*asked)

    serve(play(), engine, executor)
    assert gone
    assert {sequence.order[0] for sequence, _ in gone} == {1}
