"""A gateway's process in a run with faults: a router, what moves its requests, and the clients that have
reached it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from kvloom.lab.faults.faulty_wire import FaultyWire
from kvloom.lab.faults.host import Host
from kvloom.lab.faults.journal import Answer, Crashed, Crew, Journal
from kvloom.router.program import Program
from kvloom.router.rescheduling import Rescheduler
from kvloom.router.roster import Roster
from kvloom.router.router import Router
from kvloom.types.client import EngineClient
from kvloom.types.clock import Clock
from kvloom.types.errors import KvloomError
from kvloom.types.request import EndEvent, Event, ModelCard, PromptEvent, TokenEvent
from kvloom.types.service import GroupSpec
from kvloom.types.spec import EngineSpec


class ModelledSupervisor:
    """Satisfies the roster's `Processes`, of whichever gateway serves. away: units that have no process to
    begin with, by what they serve as far as anyone knows. leaving: those that are to lose theirs, as the last
    gateway has said. told: called with the units that are away when one has ended."""

    def __init__(
        self,
        hosts: Mapping[str, Host],
        away: Collection[str],
        clock: Clock,
        journal: Journal,
        crashed: Crashed,
        told: Callable[[Collection[str]], None],
    ) -> None:
        self.away: dict[str, Sequence[ModelCard]] = dict.fromkeys(away, ())
        self.leaving: Mapping[str, float | None] = {}
        self._hosts = hosts
        self._clock = clock
        self._journal = journal
        self._told = told
        self._crew = Crew(crashed)
        self._stops: dict[str, asyncio.Task[None]] = {}

    def begin(self) -> None:
        for name in self._hosts:
            self.renew(name)

    def renew(self, unit: str) -> None:
        """It has a process again, if it is to have one."""
        if unit not in self.away and self._hosts[unit].process is None:
            self._hosts[unit].start()

    def leave(self, units: Mapping[str, float | None]) -> None:
        """These are to lose their process once they are empty."""
        self.leaving = units

    async def start(self, spec: EngineSpec) -> None:
        """Goes on where the gateway that has asked for it is lost."""
        self.away.pop(spec.unit, None)
        await asyncio.shield(self._crew.spawn(self._start(spec.unit)))

    async def stop(self, unit: str, cards: Sequence[ModelCard]) -> None:
        """As `start`."""
        self.away[unit] = cards
        if unit not in self._stops:
            self._stops[unit] = self._crew.spawn(self._stop(unit))
        await asyncio.shield(self._stops[unit])

    def forget(self, unit: str) -> None:
        """Nobody removes units here."""

    async def _start(self, unit: str) -> None:
        if ending := self._stops.get(unit):
            await asyncio.wait([ending])
        await self._clock.sleep(self._hosts[unit].unit.start)
        if unit not in self.away and self._hosts[unit].process is None:
            self._journal.count("units started")
        self.renew(unit)

    async def _stop(self, unit: str) -> None:
        self._journal.count("units ended")
        await self._hosts[unit].stop()
        del self._stops[unit]
        self._told(self.away.keys())


T = TypeVar("T")


class Gateway:
    """crashed: called with what is no error of ours."""

    def __init__(
        self,
        wires: Mapping[str, FaultyWire],
        program: Program,
        clock: Clock,
        journal: Journal,
        crashed: Crashed,
        specs: Sequence[EngineSpec],
        groups: Mapping[str, GroupSpec],
        supervisor: ModelledSupervisor,
    ) -> None:
        self.wires = wires
        self.router = Router(wires, program, clock, away=supervisor.away)
        self.roster = Roster(
            self.router,
            specs=specs,
            groups=groups,
            processes=supervisor,
            connect=self._connect,
            changed=self._leave,
            memory=0,  # nobody plans anew
            cores=0,
        )
        self.rescheduler = Rescheduler(self.router, clock, self.roster)
        self._supervisor = supervisor
        self._gone = False
        self._clock = clock
        self._journal = journal
        self._crew = Crew(crashed)

    async def start(self) -> None:
        await self.router.__aenter__()
        await self.roster.__aenter__()
        leaving, away = self._supervisor.leaving, self._supervisor.away
        self.roster.leave({unit: leaving[unit] for unit in sorted(leaving.keys() - away.keys())})
        await self.rescheduler.__aenter__()
        self._journal("gateway", "", "is up")

    async def close(self) -> None:
        await self.rescheduler.__aexit__(None, None, None)
        self._journal.counts["moved by pairs"] += self.rescheduler.moved
        self._journal.counts["moves refused"] += self.rescheduler.stayed
        await self.roster.__aexit__(None, None, None)
        await self.router.__aexit__(None, None, None)

    async def lose(self) -> None:
        """Its process is gone at once; what its tasks still tidy up reaches nobody."""
        self._journal("gateway", "", "is lost")
        self._journal.count("gateways lost")
        self._gone = True
        for wire in self.wires.values():
            wire.cut()
        tasks = self._crew.dismiss()
        await self.roster.__aexit__(None, None, None)
        if tasks:
            await asyncio.wait(tasks)
        await self.close()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """What is done here; it ends with the process."""
        return self._crew.spawn(work)

    async def answer(self, answer: Answer) -> None:
        """Serve a client to its end."""
        client, name = answer.client, answer.client.body.request
        answer.asked = self._clock.now()
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
        """As somebody has ordered: to the first of these that it can go to."""
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

    def _leave(self, units: Mapping[str, float | None]) -> None:
        if not self._gone:
            self._supervisor.leave(units)

    async def _connect(self, unit: str) -> EngineClient:
        return self.wires[unit]

    async def _read(self, answer: Answer) -> None:
        client = answer.client
        async with aclosing(self.router.start_generate(client.body)) as frames:
            async for frame in frames:
                answer.take(frame)
                if self._journal.kept and frame:
                    self._journal("stream", client.body.request, *map(_shown, frame))
                if client.pause:
                    await self._clock.sleep(client.pause)

    async def _abort(self, answer: Answer) -> None:
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


def _wish(answer: Answer) -> str:
    body = answer.client.body
    return f"{body.sampling.max_tokens} tokens × {body.n}, priority {body.priority}"
