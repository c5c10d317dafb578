"""A burst of requests begins by turns."""

from __future__ import annotations

import asyncio
from collections import Counter

from starlette.types import Message, Receive, Scope, Send

from kvloom.api.access.turns import BEGUN, TakeTurns


class Begun:
    """An app that notes who begins in which turn of the event loop."""

    def __init__(self) -> None:
        self.who: list[str] = []
        self.turns: Counter[int] = Counter()
        self.turn = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.who.append(scope["path"])
        self.turns[self.turn] += 1

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


async def receive() -> Message:
    raise NotImplementedError


async def send(message: Message) -> None:
    raise NotImplementedError


def request(path: str, address: str | None, method: str = "POST") -> Scope:
    client = None if address is None else (address, 1)
    return {"type": "http", "method": method, "path": path, "client": client}


def play(requests: list[Scope], cancelled: int = 0) -> Begun:
    """Asks for all at once. cancelled: how many of the last ones hang up at once."""

    async def whole() -> Begun:
        app = Begun()
        turns = TakeTurns(app)
        counting = asyncio.create_task(app.count_turns())
        tasks = [asyncio.create_task(turns(scope, receive, send)) for scope in requests]
        await asyncio.sleep(0)
        for task in tasks[len(tasks) - cancelled :]:
            task.cancel()
        async with asyncio.timeout(30):
            await asyncio.gather(*tasks, return_exceptions=True)
            await turns(request("after", "a"), receive, send)
        counting.cancel()
        return app

    return asyncio.run(whole())


def test_a_burst_begins_by_turns() -> None:
    app = play([request(str(i), "a") for i in range(500)])
    assert app.who == [*map(str, range(500)), "after"]
    assert max(app.turns.values()) <= BEGUN
    assert len(app.turns) <= 500 // BEGUN + 3  # and not one by one


def test_addresses_take_turns() -> None:
    app = play([*(request(str(i), "a") for i in range(500)), request("other", "b"), request("unix", None)])
    assert app.who.index("other") <= 4 * BEGUN
    assert app.who.index("unix") <= 4 * BEGUN


def test_who_only_asks_how_things_stand_does_not_wait() -> None:
    app = play([*(request(str(i), "a") for i in range(500)), request("models", "a", "GET")])
    assert app.who.index("models") <= BEGUN


def test_who_hangs_up_meanwhile_takes_nobodys_turn() -> None:
    app = play([request(str(i), "a") for i in range(500)], cancelled=480)
    assert app.who == [*map(str, range(20)), "after"]
    assert app.turn < 480 // BEGUN
