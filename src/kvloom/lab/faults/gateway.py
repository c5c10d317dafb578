"""A gateway's process in a run with faults: a router, what moves its requests, and the clients that have
reached it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from math import inf
from typing import Any, Final, TypeVar

from kvloom.cluster.launcher import Answered, Ended, FoundProcess, News, Report, Snapshot
from kvloom.cluster.mirror import Mirror, Said
from kvloom.cluster.orders import FleetOrders
from kvloom.cluster.reconcile import Timing
from kvloom.lab.faults.faults import text_of
from kvloom.lab.faults.faulty_wire import FaultyWire
from kvloom.lab.faults.host import FaultyUnit
from kvloom.lab.faults.journal import ClientAnswer, Crashed, FaultTasks, Journal
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.plan.cost.shapes import ModelShape
from kvloom.router.program import Program
from kvloom.router.rescheduling import Rescheduler
from kvloom.router.router import Router
from kvloom.router.units import FleetLink
from kvloom.types.clock import Clock
from kvloom.types.errors import KvloomError
from kvloom.types.request import EndEvent, Event, PromptEvent, TokenEvent
from kvloom.types.spec import EngineSpec

T = TypeVar("T")


class FaultyGateway:
    """crashed: called with what is no error of ours. tell: takes what it says to the controller."""

    def __init__(
        self,
        wires: Mapping[str, FaultyWire],
        program: Program,
        clock: Clock,
        journal: Journal,
        crashed: Crashed,
        snapshot: Snapshot,
        tell: Callable[[Said], None],
    ) -> None:
        self.wires = wires
        self.mirror = Mirror(snapshot, self._send)
        self.router = Router(FleetLink(self.mirror, wires.__getitem__), program, clock)
        orders = FleetOrders(self.mirror, self.router.units, seconds=inf)
        self.rescheduler = Rescheduler(self.router, clock, orders)
        self._tell = tell
        self._gone = False
        self._clock = clock
        self._journal = journal
        self._tasks = FaultTasks(crashed)

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
        """Its process is gone at once; what its tasks still tidy up reaches nobody."""
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
        answer.asked = self._clock.now()
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


AT_ONCE: Final = Timing(first=0.0, most=0.0)
"""A fault says itself how long what has died stays away."""


class FaultyLauncher:
    """Satisfies `Launcher` with hosts, and with gateways that somebody else opens. A component that was lost
    gets no process before its time."""

    def __init__(
        self,
        hosts: Mapping[str, FaultyUnit],
        clock: Clock,
        journal: Journal,
        crashed: Crashed,
        *,
        open_gateway: Callable[[str, Snapshot], Coroutine[Any, Any, None]],
        tell: Callable[[str, News], None],
        shapes: Mapping[str, ModelShape],
    ) -> None:
        """open_gateway: serves the fleet of a snapshot as this gateway. tell: takes news to the one that
        serves. shapes: of all models that a unit may ever have."""
        self.hear: Callable[[Report], None] = lambda report: None
        """Called with what happens to a process: the controller's."""
        self._hosts = hosts
        self._clock = clock
        self._journal = journal
        self._open_gateway = open_gateway
        self._tell = tell
        self._tasks = FaultTasks(crashed)
        self._shapes = shapes
        self._called_off: set[str] = set()  # What was told to end as it started.
        self._back: dict[str, float] = {}  # When what was lost may have a process again.

    def lose(self, component: str, down: float) -> None:
        """Its process is gone, and it gets none for `down` seconds."""
        self._back[component] = self._clock.now() + down
        self.hear(Ended(component, "was lost"))

    def start(self, component: str, generation: int, engine: EngineSpec | None) -> None:
        if engine is not None:
            self._tasks.spawn(self._start(component, engine))

    def stop(self, component: str) -> None:
        if self._hosts[component].process is not None:
            self._tasks.spawn(self._stop(component))
        else:
            self._called_off.add(component)

    def kill(self, component: str) -> None:
        """Does nothing: a process that was told to end does so here."""

    def retire(self, component: str) -> None:
        """Does nothing: gateways are lost here, and not replaced."""

    def tell(self, component: str, news: News) -> None:
        if isinstance(news, Snapshot):
            self._tasks.spawn(self._serve(component, news))
        else:
            self._tell(component, news)

    def forget(self, component: str) -> None:
        """Does nothing: no component is kept here."""

    def running(self) -> Sequence[FoundProcess]:
        return [
            FoundProcess(name, 1, "ready") for name, host in self._hosts.items() if host.process is not None
        ]

    async def _start(self, unit: str, engine: EngineSpec) -> None:
        back = self._back.pop(unit, None)
        host = self._hosts[unit]
        if back is None:
            self._journal.count("units started")
            await self._clock.sleep(host.unit.start)
        else:
            await self._clock.sleep(max(0.0, back - self._clock.now()))
        if unit in self._called_off:
            self._called_off.discard(unit)
            self.hear(Ended(unit, "was stopped as it started"))
            return
        if engine != host.unit.spec:
            host.unit = self._replanned(host.unit, engine)
        host.start()
        self.hear(Answered(unit))

    def _replanned(self, unit: SimulatedUnit, engine: EngineSpec) -> SimulatedUnit:
        shapes = {model.name: self._shapes[model.name] for model in engine.models}
        return replace(unit, spec=engine, shapes=shapes)

    async def _stop(self, unit: str) -> None:
        self._journal.count("units ended")
        await self._hosts[unit].stop()
        self.hear(Ended(unit, "ended with exit code 0"))

    async def _serve(self, gateway: str, snapshot: Snapshot) -> None:
        await self._open_gateway(gateway, snapshot)
        self.hear(Answered(gateway))
