"""Where blocks are short, at home or away, the less urgent give way, wherever they are."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.sequence import Sequence
from tests.engine.modelled_weaving import MODEL, borrow, hot_unit
from tests.engine.plays import check, order, serve
from tests.modelled import ask, turns

Gone = list[tuple[Sequence, bool]]


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> Gone:
    """Who was put back, and whether from home."""
    seen, real = Gone(), ModelQueue.put_back

    def put_back(self: ModelQueue, sequence: Sequence, now: int) -> None:
        seen.append((sequence, self.planner.is_home(sequence)))
        real(self, sequence, now)

    monkeypatch.setattr(ModelQueue, "put_back", put_back)
    return seen


@pytest.mark.parametrize("seed", range(12))
def test_no_urgent_one_is_computed_again(seed: int, gone: Gone) -> None:
    """Four of sixteen are urgent, and the shortest, so that the others together always make room for them."""
    dice = random.Random(seed)
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


def test_the_urgent_go_out_in_the_place_of_the_others(gone: Gone) -> None:
    """By their numbers half would be away, just those that are not urgent. The others need twice the pool."""
    engine, executor = hot_unit(30, 60)

    async def one(i: int) -> None:
        away = i in (0, 2, 4, 5, 7)
        length, count = (30, 50) if away else (8, 40)
        body = order("r" * (i + 1), MODEL, length, priority=int(away), max_tokens=count)
        check(executor, body, await ask(engine, body), whole=True)

    async def play() -> None:
        woven = borrow(engine, 0.5, 60)
        await asyncio.gather(*map(one, range(10)))
        assert woven.went > 5

    serve(play(), engine, executor)
    assert {(sequence.order[0], here) for sequence, here in gone} >= {(1, False)}
    assert not [sequence.id for sequence, _ in gone if not sequence.order[0]]
