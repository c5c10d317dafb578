"""The processes of a run with faults that unite a fleet: gateways, with the clients that have reached them,
and fleet schedulers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from math import inf
from typing import Any, TypeVar

from kvloom.cluster.launcher import News, Snapshot
from kvloom.cluster.mirror import Mirror, Said
from kvloom.cluster.orders import FleetOrders
from kvloom.journal.records import Recorder
from kvloom.lab.faults.faults import FaultSource, text_of
from kvloom.lab.faults.faulty_wire import FaultyCalls, FaultyWire, outcome, tried
from kvloom.lab.faults.journal import ClientAnswer, Journal
from kvloom.lab.sim.fleet import ReschedulingSettings
from kvloom.lab.sim.processes import Crashed, ProcessTasks
from kvloom.router.program import Program
from kvloom.router.rescheduling import Rescheduler
from kvloom.router.router import Router
from kvloom.router.units import FleetLink
from kvloom.types.clock import Clock
from kvloom.types.errors import KvloomError, RequestQuarantined, Unavailable
from kvloom.types.request import EndEvent, Event, PromptEvent, TokenEvent
from kvloom.types.service import FleetState, Pairs, Steps

T = TypeVar("T")


class FaultyGateway:
    """A gateway's process, with the clients that have reached it."""

    def __init__(
        self,
        wires: Mapping[str, FaultyWire],
        program: Program,
        clock: Clock,
        journal: Journal,
        crashed: Crashed,
        snapshot: Snapshot,
        tell: Callable[[Said], None],
        record: Recorder,
    ) -> None:
        """`crashed` is called with errors that are none of kvloom's own. `tell` takes what it says to the
        controller, and `record` takes what it decides to the fleet's journal."""
        self.wires = wires
        self.mirror = Mirror(snapshot, self._send)
        link = FleetLink(self.mirror, wires.__getitem__)
        self.router = Router(link, program, clock, record=record)
        orders = FleetOrders(self.mirror, self.router.units, seconds=inf)
        self.rescheduler = Rescheduler(self.router, clock, orders, record)
        self._tell = tell
        self._gone = False
        self._clock = clock
        self._journal = journal
        self._tasks = ProcessTasks(crashed)

    async def start(self) -> None:
        await self.router.__aenter__()
        await self.rescheduler.__aenter__()
        self._journal("gateway", "", "is up")

    def heed(self, news: News) -> None:
        """Takes in what the controller tells the gateway."""
        if not self._gone:
            self.mirror.heed(news)

    def _send(self, said: Said) -> None:
        if not self._gone:
            self._tell(said)

    async def close(self) -> None:
        await self.rescheduler.__aexit__(None, None, None)
        self._journal.counts["moved by pairs"] += self.rescheduler.moved
        self._journal.counts["moves refused"] += self.rescheduler.stayed
        await self.router.__aexit__(None, None, None)

    async def lose(self) -> None:
        """Ends the process at once; what its tasks still tidy up reaches nobody."""
        self._journal("gateway", "", "is lost")
        self._journal.count("gateways lost")
        self._gone = True
        for wire in self.wires.values():
            wire.cut()
        tasks = self._tasks.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.close()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs work of this process, which ends with it."""
        return self._tasks.spawn(work)

    async def answer(self, answer: ClientAnswer) -> None:
        """Serves a client to its end."""
        client, name = answer.client, answer.client.body.request
        if client.body.sampling.guide is not None:
            self._journal.count("requests guided")
        self._journal(
            "client", name, "asks for", client.body.model, len(client.body.prompt), "+", _wish(answer)
        )
        aborting = self.spawn(self._abort(answer)) if client.aborts is not None else None
        try:
            async with asyncio.timeout(client.leaves) as leaving:
                await self._read(answer)
            answer.fate = "ended"
        except TimeoutError:
            if not leaving.expired():
                raise
            answer.fate = "left"
        except KvloomError as error:
            answer.fate, answer.error = "failed", error
            if isinstance(error, RequestQuarantined):
                self._journal.count("requests quarantined")
        except asyncio.CancelledError:
            answer.fate = "lost"
            raise
        finally:
            answer.over = self._clock.now()
            if aborting is not None:
                aborting.cancel()
            self._journal.count(f"requests {answer.fate}")
            self._journal("client", name, answer.fate, answer.error.message if answer.error else "")

    async def move(self, request: str, units: Sequence[str]) -> None:
        """Moves a request, as somebody has ordered, to the first of these units that it can go to."""
        for unit in units:
            self._journal("order", unit, "is to have", request)
            try:
                await self.router.move(request, unit)
            except KvloomError as error:
                self._journal("order", unit, f"{request} stays:", error.message)
                self._journal.count("moves refused")
            else:
                self._journal.count("moved by order")
                return

    async def _read(self, answer: ClientAnswer) -> None:
        client = answer.client
        async with aclosing(self.router.start_generate(client.body)) as frames:
            async for frame in frames:
                answer.take(frame)
                if self._journal.kept and frame:
                    self._journal("stream", client.body.request, *map(_shown, frame))
                if client.stop:
                    await self._stop(answer)
                if client.pause:
                    await self._clock.sleep(client.pause)

    async def _stop(self, answer: ClientAnswer) -> None:
        """Ends the choices whose text holds the stop string, as the API does."""
        request, stop = answer.client.body.request, answer.client.stop
        for choice, tokens in answer.tokens.items():
            if choice not in answer.ends and choice not in answer.stopped and stop in text_of(tokens):
                answer.stopped.add(choice)
                self._journal("client", request, "has its stop string in", choice)
                self._journal.count("choices stopped")
                with suppress(KvloomError):
                    await self.router.abort(request, choice)

    async def _abort(self, answer: ClientAnswer) -> None:
        client = answer.client
        await self._clock.sleep(client.aborts or 0.0)
        answer.aborted = True
        self._journal("client", client.body.request, "aborts", "" if client.choice is None else client.choice)
        with suppress(KvloomError):
            await self.router.abort(client.body.request, client.choice)


def _shown(event: Event) -> str:
    match event:
        case TokenEvent():
            return f"{event.choice}[{event.index}]={event.token}"
        case EndEvent():
            return " ".join(filter(None, (f"{event.choice} ends:", event.reason, event.message)))
        case PromptEvent():
            return f"a report of {len(event.logprobs)} tokens"


def _wish(answer: ClientAnswer) -> str:
    body = answer.client.body
    return f"{body.sampling.max_tokens} tokens × {body.n}, priority {body.priority}"


Verb = Callable[[Rescheduler], Awaitable[T]]


class FleetWire(FaultyCalls):
    """Satisfies `FleetControl`: a fleet scheduler's calls to the gateway that is there."""

    def __init__(
        self,
        gateway: Callable[[], FaultyGateway | None],
        clock: Clock,
        delay: float,
        faults: FaultSource,
        journal: Journal,
        crashed: Crashed,
    ) -> None:
        """`gateway` returns None while there is none."""
        super().__init__(("fleet", ""), clock, delay, faults, journal, crashed)
        self._gateway = gateway

    async def state(self) -> FleetState:
        return await self._call("state", lambda gateway: gateway.state())

    async def pair(self, pairs: Pairs) -> None:
        told = ", ".join(f"{one.source} > {one.destination}" for one in pairs.pairs)
        await self._call(f"pair {told}", lambda gateway: gateway.pair(pairs))

    async def scale(self, steps: Steps) -> None:
        await self._call("scale", lambda gateway: gateway.scale(steps))

    async def _call(self, name: str, verb: Verb[T]) -> T:
        """Sends the call at once, and waits for the answer."""
        answer: T = await asyncio.shield(self._tasks.spawn(self._carry(name, verb)))
        return answer

    async def _carry(self, name: str, verb: Verb[T]) -> T:
        fault = self._send(name)
        await self._go(fault)
        if fault.again is not None:
            self._tasks.spawn(self._once_more(verb, fault.again))
        answer = await self._served(verb)
        await self._come_back(fault)
        return answer

    async def _once_more(self, verb: Verb[Any], after: float) -> None:
        """Makes the second copy of the call, for whose answer nobody waits."""
        await self._clock.sleep(after)
        await self._served(verb)

    async def _served(self, verb: Verb[T]) -> T:
        """Returns or raises what the gateway does, unless it is lost meanwhile."""
        gateway = self._gateway()
        if gateway is None:
            raise Unavailable("nobody answers there")
        answering = gateway.spawn(tried(verb(gateway.rescheduler)))
        await asyncio.wait([answering])
        if answering.cancelled():
            raise Unavailable("the connection broke: the gateway is gone")
        return outcome(answering)


class SchedulerProcess:
    """A fleet scheduler that is lost and started anew, and knows nothing when it starts."""

    def __init__(
        self, given: ReschedulingSettings, wire: FleetWire, clock: Clock, journal: Journal, crashed: Crashed
    ) -> None:
        self._given = given
        self._wire = wire
        self._clock = clock
        self._journal = journal
        self._crashed = crashed
        self._tasks: ProcessTasks | None = None

    def start(self) -> None:
        if self._tasks is None:
            self._tasks = ProcessTasks(self._crashed)
            scheduler = self._given.scheduler(self._wire, self._clock)
            self._tasks.spawn(scheduler.run())
            self._journal("fleet", "", "scheduler starts")

    def kill(self) -> None:
        if self._tasks is not None:
            self._tasks.cancel()
            self._tasks = None
            self._journal("fleet", "", "scheduler dies")
