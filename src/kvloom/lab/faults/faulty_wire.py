"""Calls that are lost, late or doubled, and streams that break, as the seed has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from kvloom.lab.faults.faults import CallFault, FaultSource
from kvloom.lab.faults.host import FaultyHost
from kvloom.lab.faults.journal import Journal
from kvloom.lab.sim.processes import Crashed, EngineProcess, ProcessTasks
from kvloom.types.client import EngineClient
from kvloom.types.clock import Clock
from kvloom.types.errors import ConnectionLost, HostAway, KvloomError, Unavailable
from kvloom.types.request import Event, StartGenerate
from kvloom.types.verbs import Answer, Body, RemoteEngine, Verb

T = TypeVar("T")
Asking = Callable[[EngineClient], Awaitable[T]]
Queue = asyncio.Queue[list[Event] | KvloomError | None]


class FaultyCalls:
    """Calls to a process, as HTTP would carry them: what has gone out arrives, even if its caller has stopped
    waiting."""

    def __init__(
        self,
        told: tuple[str, str],
        clock: Clock,
        delay: float,
        faults: FaultSource,
        journal: Journal,
        crashed: Crashed,
    ) -> None:
        """`told` is what and whom the journal's lines are about, and `delay` the seconds of one way.
        `crashed` is called with errors that are none of kvloom's own."""
        self._told = told
        self._clock = clock
        self._delay = delay
        self._faults = faults
        self._journal = journal
        self._tasks = ProcessTasks(crashed, expected=(KvloomError,))

    def _send(self, name: str, about: str = "") -> CallFault:
        fault = self._faults.next()
        self._journal.count("calls")
        if str(fault):
            self._journal.count("calls harmed")
        self._tell(name, about, "is sent", f"({fault})" if str(fault) else "")
        return fault

    async def _go(self, fault: CallFault) -> None:
        """Takes the way there."""
        await self._clock.sleep(self._delay + fault.late)
        if fault.lost:
            await self._clock.sleep(fault.noticed)
            raise Unavailable("the connection broke on the way there")

    async def _come_back(self, fault: CallFault) -> None:
        """Takes the way back."""
        if fault.unanswered:
            await self._clock.sleep(fault.noticed)
            raise ConnectionLost("the connection broke before the answer")
        await self._clock.sleep(self._delay + fault.slow)

    def _tell(self, name: str, *how: object) -> None:
        self._journal(*self._told, name, *how)


async def tried(work: Awaitable[T]) -> T | KvloomError:
    """Returns the error of the work instead of raising it, because a process's tasks fail of none."""
    try:
        return await work
    except KvloomError as error:
        return error


def outcome(served: asyncio.Task[T | KvloomError]) -> T:
    """Returns or raises what `tried` has returned."""
    answer = served.result()
    if isinstance(answer, KvloomError):
        raise answer
    return answer


class FaultyWire(FaultyCalls, RemoteEngine):
    """Satisfies `EngineClient`. A send and a stream end with their callers."""

    def __init__(
        self,
        host: FaultyHost,
        clock: Clock,
        delay: float,
        faults: FaultSource,
        journal: Journal,
        crashed: Crashed,
    ) -> None:
        super().__init__(("call", host.name), clock, delay, faults, journal, crashed)
        self._host = host
        self._gone = False

    def cut(self) -> None:
        """Notes that the caller's process is gone: it asks nothing any more."""
        self._gone = True

    # -- verbs that answer once -------------------------------------------------------------------------

    async def call(self, verb: Verb[Body, Answer], body: Body) -> Answer:
        """Sends the verb at once, and waits for the answer."""
        name, about = verb.name, getattr(body, "request", "")
        fault = self._send(name, about)
        carrying = self._tasks.spawn(self._carry(name, about, partial(verb.ask, body=body), fault))
        try:
            answer: Answer = await asyncio.shield(carrying)
        except asyncio.CancelledError:
            if verb.waits:
                asyncio.get_running_loop().call_later(fault.noticed, carrying.cancel)
            raise
        except KvloomError as error:
            self._tell(name, about, "fails:", error.message)
            raise
        return answer

    async def _carry(self, name: str, about: str, verb: Asking[T], fault: CallFault) -> T:
        process = await self._arrive(fault)
        if fault.again is not None:
            self._tasks.spawn(self._once_more(name, about, verb, fault.again))
        served = process.tasks.spawn(tried(verb(process.engine)))
        answer: T = await self._outcome(process, served)
        await self._reached()
        await self._come_back(fault)
        self._tell(name, about, "is answered")
        return answer

    async def _outcome(self, process: EngineProcess, served: asyncio.Task[Any]) -> Any:
        """Returns or raises what the engine did, unless it has died meanwhile."""
        both: list[asyncio.Future[Any]] = [served, process.ended]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            served.cancel()
        if process.ended.done():
            await self._reached()
            raise ConnectionLost("the connection broke: the engine is gone")
        return outcome(served)

    async def _reached(self) -> None:
        """Waits while the engine's node is cut off. Raises HostAway if it is given up."""
        while (outage := self._host.outage) is not None:
            if not await asyncio.shield(outage.over):
                raise HostAway("the engine's node does not answer")

    async def _once_more(self, name: str, about: str, verb: Asking[T], after: float) -> None:
        """Makes the second copy of the call, for whose answer nobody waits."""
        await self._clock.sleep(after)
        process = self._host.process
        if process is not None:
            self._tell(name, about, "arrives again")
            await asyncio.wait([process.tasks.spawn(tried(verb(process.engine)))])

    # -- the one that streams ---------------------------------------------------------------------------

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        fault, frames = self._send("start_generate", body.request), Queue()
        carrying = self._tasks.spawn(self._carry_stream(body, fault, frames))
        left = fault.cut
        try:
            while (frame := await frames.get()) is not None:
                await self._reached()
                if left == 0:
                    raise ConnectionLost("the engine's stream broke")
                if isinstance(frame, KvloomError):
                    raise frame
                yield frame
                left = None if left is None else left - 1
        except KvloomError as error:
            self._tell("start_generate", body.request, "fails:", error.message)
            raise
        finally:
            if not carrying.done():
                self._tell("start_generate", body.request, "is hung up")
                asyncio.get_running_loop().call_later(fault.noticed, carrying.cancel)

    async def _carry_stream(self, body: StartGenerate, fault: CallFault, frames: Queue) -> None:
        try:
            process = await self._arrive(fault)
            if fault.again is not None:
                verb = partial(self._first_frame, body)
                self._tasks.spawn(self._once_more("start_generate", body.request, verb, fault.again))
            served = process.tasks.spawn(tried(self._pump(body, frames, process.engine)))
            await self._outcome(process, served)
        except KvloomError as error:
            frames.put_nowait(error)
        frames.put_nowait(None)

    async def _pump(self, body: StartGenerate, frames: Queue, engine: EngineClient) -> None:
        async with aclosing(engine.start_generate(body)) as events:
            async for frame in events:
                frames.put_nowait(frame)

    async def _first_frame(self, body: StartGenerate, engine: EngineClient) -> None:
        """Makes the second copy of a stream, to which nobody listens for long."""
        async with aclosing(engine.start_generate(body)) as events:
            await anext(events, None)

    # -- both of them -----------------------------------------------------------------------------------

    def _send(self, name: str, about: str = "") -> CallFault:
        if self._gone:
            raise Unavailable("the gateway is gone")
        return super()._send(name, about)

    async def _arrive(self, fault: CallFault) -> EngineProcess:
        await self._go(fault)
        await self._reached()
        if self._host.process is None:
            raise Unavailable("nobody answers there")
        return self._host.process
