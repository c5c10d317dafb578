"""Open loop: each request is sent when it is due, whatever became of those before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kvloom.bench.endpoint import Endpoint
from kvloom.core.clock import Clock
from kvloom.workload.ask import Ask, Outcome
from kvloom.workload.histogram import Histogram


async def drive(
    asks: Iterable[Ask],
    endpoint: Endpoint,
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
            begin = clock.now() - ask.at if begin is None else begin
            due = begin + ask.at
            await clock.sleep(max(0.0, due - clock.now()))
            group.create_task(one(ask, body, due))
            sent()
    return late
