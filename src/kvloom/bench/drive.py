"""Open loop: each request is sent when it is due, whatever became of those before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from kvloom.types.clock import Clock
from kvloom.workload.ask import Ask, Outcome
from kvloom.workload.histogram import Histogram


class Asked(Protocol):
    """Who is asked."""

    def body(self, number: int, ask: Ask) -> bytes:
        """What is to be sent for a workload's request `number`."""

    async def ask(self, ask: Ask, body: bytes, due: float) -> Outcome:
        """What became of it, in seconds from `due` on the clock."""


async def drive(
    asks: Iterable[Ask],
    endpoint: Asked,
    clock: Clock,
    sent: Callable[[], None],
    tell: Callable[[Outcome], None],
) -> Histogram:
    """Returns by how many seconds requests were sent later than they were due. Asks come in order; a body is
    written before it is due. Memory is bounded in the requests that are over."""
    late = Histogram()

    async def one(ask: Ask, body: bytes, due: float) -> None:
        late.add(max(0.0, clock.now() - due))
        tell(await endpoint.ask(ask, body, due))

    begin: float | None = None
    async with asyncio.TaskGroup() as group:
        for number, ask in enumerate(asks):
            body = endpoint.body(number, ask)
            begin = clock.now() if begin is None else begin
            due = begin + ask.at
            await clock.sleep(max(0.0, due - clock.now()))
            group.create_task(one(ask, body, due))
            sent()
            await asyncio.sleep(0)  # it goes out before the next body is written
    return late
