"""Open loop, in made-up time: when requests go out, and how late."""

from __future__ import annotations

import asyncio

from kvloom.lab.bench.run import drive
from kvloom.lab.workload.request import RequestResult, WorkloadRequest
from kvloom.lab.workload.summary import Histogram


class Jumping:
    """A clock that sleeping moves on."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds
        await asyncio.sleep(0)


class Server:
    """To write a body takes `effort` seconds. Nobody is answered before `last` requests are there."""

    def __init__(self, clock: Jumping, effort: float, last: int) -> None:
        self.clock = clock
        self.effort = effort
        self.last = last
        self.sent: list[tuple[bytes, float]] = []
        self.every = asyncio.Event()

    def body(self, number: int, ask: WorkloadRequest) -> bytes:
        self.clock.time += self.effort
        return b"%d" % number

    async def ask(self, ask: WorkloadRequest, body: bytes, due: float) -> RequestResult:
        self.sent.append((body, self.clock.now() - 100.0))
        if len(self.sent) == self.last:
            self.every.set()
        await self.every.wait()
        return RequestResult(request=ask, first=0.0, end=self.clock.now() - due, tokens=1)


def driven(times: list[float], effort: float) -> tuple[Server, Histogram, list[RequestResult], int]:
    asks = [WorkloadRequest(at=at, model="a", prompt=1, output=1) for at in times]
    outcomes: list[RequestResult] = []
    sent = 0

    def count() -> None:
        nonlocal sent
        sent += 1

    async def run() -> tuple[Server, Histogram]:
        clock = Jumping()
        server = Server(clock, effort, len(asks))
        return server, await drive(asks, server, clock, count, outcomes.append)

    server, late = asyncio.run(run())
    return server, late, outcomes, sent


def test_each_goes_out_when_it_is_due_and_waits_for_no_answer() -> None:
    server, late, outcomes, sent = driven([5.0, 5.5, 5.5, 9.0], effort=0.0)
    assert server.sent == [(b"0", 5.0), (b"1", 5.5), (b"2", 5.5), (b"3", 9.0)]
    assert (late.count, late.most) == (4, 0.0)
    assert sorted(outcome.end or 0.0 for outcome in outcomes) == [0.0, 3.5, 3.5, 4.0]
    assert sent == 4


def test_a_body_is_written_before_it_is_due_and_lateness_is_told() -> None:
    """The third has no time left for it; the others have."""
    server, late, outcomes, _ = driven([0.0, 1.0, 1.25, 3.0], effort=0.5)
    assert server.sent == [(b"0", 0.5), (b"1", 1.5), (b"2", 2.0), (b"3", 3.5)]
    assert sorted(outcome.request.at for outcome in outcomes) == [0.0, 1.0, 1.25, 3.0]
    assert (late.most, late.total) == (0.25, 0.25)
