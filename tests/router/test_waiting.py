"""Who waits is told of what concerns it."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

import pytest

from kvloom.router.candidates import WaitingRoom
from kvloom.types.errors import Unavailable
from tests.router.fleets import ask, begin, body, turns
from tests.router.managed import managed


async def test_a_change_wakes_only_those_whom_it_concerns() -> None:
    room, looked, over = WaitingRoom(60.0), Counter[str](), False

    def needed(name: str) -> bool:
        looked[name] += 1
        return not over

    tasks = [
        asyncio.create_task(room.wait_while(partial(needed, name), model, name))
        for name, model in {"a": "m", "b": "m", "c": "n"}.items()
    ]
    await turns()
    room.tell_one("m", "b")
    room.tell_one("m", "nobody")
    await turns()
    assert (looked, room.waiting) == ({"a": 2, "b": 3, "c": 2}, {"m": 2, "n": 1})
    room.tell({"n", "another"})
    await turns()
    assert looked == {"a": 2, "b": 3, "c": 3}
    over = True
    room.tell({"m", "n"})
    await asyncio.gather(*tasks)
    assert (looked, room.waiting) == ({"a": 3, "b": 4, "c": 4}, {})


async def test_who_waits_for_too_long() -> None:
    room = WaitingRoom(0.0)
    with pytest.raises(TimeoutError):
        await room.wait_while(lambda: True, "m", "r")
    assert not room.waiting
    room.tell_one("m", "r")


async def test_who_waits_for_a_dead_unit_that_is_drained_is_told_at_once() -> None:
    async with managed(1) as played:
        played.processes.die("a")
        await turns()
        waiting = await begin(ask(played.fleets.router, body()))
        assert played.states() == {"a": "down"}
        draining = await begin(played.orders.drain("a", 0.0))
        with pytest.raises(Unavailable):
            await waiting
        await draining
