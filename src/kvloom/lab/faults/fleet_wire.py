"""A fleet scheduler's process in a run with faults, and its calls to the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from kvloom.cluster.scheduler import FleetScheduler
from kvloom.lab.faults.faults import FaultSource
from kvloom.lab.faults.gateway import FaultyGateway
from kvloom.lab.faults.journal import Journal
from kvloom.lab.sim.fleet import Rescheduling
from kvloom.lab.sim.processes import Crashed, ProcessTasks
from kvloom.router.rescheduling import Rescheduler
from kvloom.types.clock import Clock
from kvloom.types.errors import KvloomError, Unavailable
from kvloom.types.service import FleetState, Pairs, Steps

T = TypeVar("T")
Verb = Callable[[Rescheduler], Awaitable[T]]


class FleetWire:
    """Satisfies `FleetControl`, as HTTP to the gateway that is there would: what has gone out arrives,
    whoever has stopped waiting for it. gateway: None while there is none. delay: seconds of one way."""

    def __init__(
        self,
        gateway: Callable[[], FaultyGateway | None],
        clock: Clock,
        delay: float,
        faults: FaultSource,
        journal: Journal,
        crashed: Crashed,
    ) -> None:
        self._gateway = gateway
        self._clock = clock
        self._delay = delay
        self._faults = faults
        self._journal = journal
        self._tasks = ProcessTasks(crashed, expected=(KvloomError,))

    async def state(self) -> FleetState:
        return await self._call("state", lambda gateway: gateway.state())

    async def pair(self, pairs: Pairs) -> None:
        told = ", ".join(f"{one.source} > {one.destination}" for one in pairs.pairs)
        await self._call(f"pair {told}", lambda gateway: gateway.pair(pairs))

    async def scale(self, steps: Steps) -> None:
        await self._call("scale", lambda gateway: gateway.scale(steps))

    async def _call(self, name: str, verb: Verb[T]) -> T:
        """Sent at once; the answer is waited for."""
        answer: T = await asyncio.shield(self._tasks.spawn(self._carry(name, verb)))
        return answer

    async def _carry(self, name: str, verb: Verb[T]) -> T:
        fault = self._faults.next()
        self._journal.count("calls")
        if str(fault):
            self._journal.count("calls harmed")
        self._journal("fleet", "", name, "is sent", f"({fault})" if str(fault) else "")
        await self._clock.sleep(self._delay + fault.late)
        if fault.lost:
            await self._clock.sleep(fault.noticed)
            raise Unavailable("the connection broke on the way there")
        if fault.again is not None:
            self._tasks.spawn(self._once_more(verb, fault.again))
        answer = await self._served(verb)
        if fault.unanswered:
            await self._clock.sleep(fault.noticed)
            raise Unavailable("the connection broke before the answer")
        await self._clock.sleep(self._delay + fault.slow)
        return answer

    async def _once_more(self, verb: Verb[Any], after: float) -> None:
        """Nobody waits for what the second copy is answered."""
        await self._clock.sleep(after)
        await self._served(verb)

    async def _served(self, verb: Verb[T]) -> T:
        """Returns or raises what the gateway does, unless it is lost meanwhile."""
        gateway = self._gateway()
        if gateway is None:
            raise Unavailable("nobody answers there")
        answering = gateway.spawn(_tried(verb, gateway.rescheduler))
        await asyncio.wait([answering])
        if answering.cancelled():
            raise Unavailable("the connection broke: the gateway is gone")
        answer = answering.result()
        if isinstance(answer, KvloomError):
            raise answer
        return answer


async def _tried(verb: Verb[T], rescheduler: Rescheduler) -> T | KvloomError:
    try:
        return await verb(rescheduler)
    except KvloomError as error:
        return error


class SchedulerProcess:
    """A fleet scheduler that is lost and started anew, and knows nothing when it starts."""

    def __init__(
        self, given: Rescheduling, wire: FleetWire, clock: Clock, journal: Journal, crashed: Crashed
    ) -> None:
        self._given = given
        self._wire = wire
        self._clock = clock
        self._journal = journal
        self._crashed = crashed
        self._tasks: ProcessTasks | None = None

    def start(self) -> None:
        if self._tasks is None:
            given, self._tasks = self._given, ProcessTasks(self._crashed)
            scheduler = FleetScheduler(
                self._wire, self._clock, period=given.period, thresholds=given.thresholds
            )
            self._tasks.spawn(scheduler.run())
            self._journal("fleet", "", "scheduler starts")

    def kill(self) -> None:
        if self._tasks is not None:
            self._tasks.cancel()
            self._tasks = None
            self._journal("fleet", "", "scheduler dies")
