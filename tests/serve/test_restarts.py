"""What a gateway asks its supervisor for, and whom the news are for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvloom.serve.orders import Asked, Back, Restart, Restarted, Run, Stop, Stopped
from kvloom.serve.restarts import Restarts
from kvloom.serve.shelf import Shelf
from kvloom.types.errors import Conflict, Unavailable
from tests.router.roster import spec


def restarts(folder: Path) -> tuple[Restarts, list[Asked]]:
    asked: list[Asked] = []
    return Restarts(asked.append, Shelf(folder)), asked


def test_each_order_has_its_own_news(tmp_path: Path) -> None:
    async def test() -> None:
        one, asked = restarts(tmp_path)
        starting = asyncio.create_task(one.start(spec("a")))
        alive = asyncio.create_task(one.start(spec("d")))  # it is about to come back by itself
        restarting = asyncio.create_task(one("b"))
        stopping = asyncio.create_task(one.stop("c", []))
        await asyncio.sleep(0)
        assert asked == [Run(spec("a")), Run(spec("d")), Restart("b"), Stop("c")]
        one.heed(Back("b"))
        one.heed(Back("d"))
        await alive
        assert not restarting.done()
        one.heed(Restarted("c"))  # news of another time
        one.heed(Restarted("nobody"))
        one.heed(Restarted("a", "a ended with exit code 3 as it started"))
        one.heed(Restarted("a"))
        one.heed(Restarted("b"))
        with pytest.raises(Unavailable, match="exit code 3"):
            await starting
        await restarting
        assert not stopping.done()
        one.heed(Stopped("c"))
        await stopping

    asyncio.run(test())


def test_a_unit_that_is_stopped_while_it_restarts(tmp_path: Path) -> None:
    """Nobody waits for ever."""

    async def test() -> None:
        one, _ = restarts(tmp_path)
        restarting = asyncio.create_task(one("a"))
        stopping = asyncio.create_task(one.stop("a", []))
        starting = asyncio.create_task(one.start(spec("a")))  # after another gateway's stop
        await asyncio.sleep(0)
        with pytest.raises(Conflict, match="already"):
            await one("a")
        one.heed(Stopped("a"))
        await stopping
        with pytest.raises(Unavailable, match="a was stopped meanwhile"):
            await restarting
        again = asyncio.create_task(one("a"))
        await asyncio.sleep(0)
        assert not starting.done()
        one.heed(Restarted("a"))
        await again
        await starting

    asyncio.run(test())
