"""A burst of requests begins by turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise

import pytest
from starlette.types import Message, Receive, Scope, Send

from kvloom.api.access.turns import MOST_BEGUN, REST, Pace, TakeTurns, Turns
from kvloom.types.errors import QueueFull
from tests.processes import DEADLINE


class Begun:
    """An app that notes who begins in which turn of the event loop."""

    def __init__(self) -> None:
        self.who: list[str] = []
        self.turns: Counter[int] = Counter()
        self.turn = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        self.who.append(scope["path"])
        self.turns[self.turn] += 1

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


async def receive() -> Message:
    return {"type": "http.request"}


async def send(message: Message) -> None:
    raise NotImplementedError


def request(path: str, address: str | None, method: str = "POST") -> Scope:
    client = None if address is None else (address, 1)
    return {"type": "http", "method": method, "path": path, "client": client}


def play(requests: list[Scope], cancelled: int = 0, *, late: bool = False) -> Begun:
    """Asks for all at once. cancelled: how many of the last ones hang up at once; late: whether the last
    bytes of all bodies come together, after the others."""

    async def whole() -> Begun:
        app = Begun()
        turns = TakeTurns(app)
        rest, counting = asyncio.Event(), asyncio.create_task(app.count_turns())

        def body() -> Receive:
            pieces = iter((True, False))

            async def receive() -> Message:
                more = next(pieces)
                if not more:
                    await rest.wait()
                return {"type": "http.request", "more_body": more}

            return receive

        asked = [(scope, body() if late else receive) for scope in requests]
        tasks = [asyncio.create_task(turns(scope, its, send)) for scope, its in asked]
        for _ in range(len(requests) if late else 1):
            await asyncio.sleep(0)
        rest.set()
        for task in tasks[len(tasks) - cancelled :]:
            task.cancel()
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(*tasks, return_exceptions=True)
            await turns(request("after", "a"), receive, send)
        counting.cancel()
        return app

    return asyncio.run(whole())


@pytest.mark.parametrize("late", [False, True], ids=["whole", "with late last bytes"])
def test_a_burst_begins_by_turns(late: bool) -> None:
    app = play([request(str(i), "a") for i in range(500)], late=late)
    assert app.who == [*map(str, range(500)), "after"]
    assert max(app.turns.values()) <= MOST_BEGUN
    assert len(app.turns) <= 500 // MOST_BEGUN + 3  # and not one by one


@pytest.mark.parametrize("address", ["10.0.0.1", "2001:db8::{:x}"])  # of IPv6, those of one subscriber
def test_addresses_take_turns(address: str) -> None:
    loud = [request(str(i), address.format(i)) for i in range(500)]
    app = play([*loud, request("other", "10.0.0.2"), request("unix", None)])
    assert app.who.index("other") <= 4 * MOST_BEGUN
    assert app.who.index("unix") <= 4 * MOST_BEGUN


def test_who_only_asks_how_things_stand_does_not_wait() -> None:
    app = play([*(request(str(i), "a") for i in range(500)), request("models", "a", "GET")])
    assert app.who.index("models") <= MOST_BEGUN


def test_who_hangs_up_meanwhile_takes_nobodys_turn() -> None:
    app = play([request(str(i), "a") for i in range(500)], cancelled=480)
    assert app.who == [*map(str, range(20)), "after"]
    assert app.turn < 480 // MOST_BEGUN


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_tenants_get_turns_in_turn_and_who_leaves_takes_none() -> None:
    async def whole() -> None:
        turns, who = Turns(1), list[str]()

        async def one(tenant: str) -> None:
            await turns.take(tenant)
            who.append(tenant)

        tasks = [asyncio.create_task(one(tenant)) for tenant in "aaaaabcc"]
        await settled()
        tasks[2].cancel()  # it waits
        await settled()
        turns.give()
        tasks[1].cancel()  # it has just been given a turn, of which it does not know yet
        await settled()
        assert who == ["a", "b"]
        while len(who) < 6:
            turns.give()
            await settled()
        assert who == list("abcaca")
        assert turns.free == 0
        turns.give()
        assert turns.free == 1

    asyncio.run(whole())


def test_a_tenant_has_a_bounded_number_that_wait() -> None:
    async def whole() -> None:
        turns = Turns(1, most=2)
        await turns.take("a")
        tasks = [asyncio.create_task(turns.take("a")) for _ in range(2)]
        await settled()
        with pytest.raises(QueueFull, match="2 requests of this caller wait"):
            await turns.take("a")
        tasks.append(asyncio.create_task(turns.take("b")))
        tasks[0].cancel()
        await settled()
        tasks.append(asyncio.create_task(turns.take("a")))
        for _ in range(3):
            await settled()
            turns.give()
        await asyncio.gather(*tasks[1:])

    asyncio.run(whole())


def test_long_work_leaves_the_loop_to_others_for_some_times_as_long() -> None:
    """The work takes its time of a clock of its own; the rests are real, and may be longer."""
    took, now, begun, who = 0.002, 0.0, list[float](), list[str]()

    async def whole() -> None:
        pace, loop = Pace(lambda: now), asyncio.get_running_loop()

        def work(tenant: str) -> None:
            nonlocal now
            now += took
            begun.append(loop.time())
            who.append(tenant)
            if len(who) == 1:
                raise ValueError("the first")

        asked = [pace.run(tenant, lambda tenant=tenant: work(tenant)) for tenant in "aaab"]  # type: ignore[misc]
        first, *others = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(first, ValueError)
        assert others == [None] * 3

    asyncio.run(whole())
    assert who == list("aaba")
    assert all(after - before >= REST * took for before, after in pairwise(begun))
