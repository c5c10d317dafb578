"""Who waits is told of what concerns it."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kvloom.router.waiting import WaitingRoom
from tests.router.fleets import run, turns


def test_one_that_is_told_looks_alone_and_all_do_where_all_are() -> None:
    async def test() -> None:
        room, looked, over = WaitingRoom(60.0), Counter[str](), False

        def needed(name: str) -> bool:
            looked[name] += 1
            return not over

        tasks = [
            asyncio.create_task(room.wait_while(lambda name=name: needed(name), "m", name))  # type: ignore[misc]
            for name in "abc"
        ]
        await turns()
        room.tell_one("b")
        room.tell_one("nobody")
        await turns()
        assert (looked, room.waiting) == ({"a": 2, "b": 3, "c": 2}, {"m": 3})
        over = True
        room.tell()
        await asyncio.gather(*tasks)
        assert (looked, room.waiting["m"]) == ({"a": 3, "b": 4, "c": 3}, 0)

    run(test)


def test_who_waits_for_too_long() -> None:
    async def test() -> None:
        room = WaitingRoom(0.0)
        with pytest.raises(TimeoutError):
            await room.wait_while(lambda: True, "m", "r")
        assert not room.waiting["m"]
        room.tell_one("r")

    run(test)
