"""The router: shows many engines to its callers as one, and runs a program that says which engine does
what."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from kvloom.cluster.policies.moving import LONGEST_PAUSE, MoveCounts, MoveTerms
from kvloom.cluster.prefixes import PrefixCopies
from kvloom.journal.lives import Teller, untold
from kvloom.journal.records import Recorder, nobody
from kvloom.kv.prefix_index import PrefixIndex
from kvloom.router.candidates import WaitingRoom
from kvloom.router.migration import Migration
from kvloom.router.program import Program
from kvloom.router.quarantine import Quarantine
from kvloom.router.replicas import Fleet, Replica, arriving
from kvloom.router.session import Session
from kvloom.router.units import FleetLink, Units
from kvloom.types.client import EngineClient, Frames
from kvloom.types.clock import Clock
from kvloom.types.errors import BadRequest, ConfigError, Unavailable, UnknownModel
from kvloom.types.load import UnitLoad
from kvloom.types.request import ModelCard, StartGenerate
from kvloom.types.service import NO_PROCESS, PATIENCE, Service


class Router:
    """Many engines as one `Server`. It is an async context manager, and watches its units while it is
    open."""

    def __init__(
        self,
        engines: Mapping[str, EngineClient] | FleetLink,
        program: Program,
        clock: Clock,
        *,
        patience: float = PATIENCE,
        record: Recorder = nobody,
        tell: Teller = untold,
    ) -> None:
        """engines: the units and their clients, or a link to the controller that says which units there are;
        patience: seconds that a request waits if no unit that serves its model is up, but one will be;
        record: takes quarantines to the journal; tell: takes what is known of requests' lives."""
        self._index = PrefixIndex()
        self._waiting = WaitingRoom(patience)
        self._quarantine = Quarantine(clock, record)
        link = engines if isinstance(engines, FleetLink) else None
        self._units = Units(
            {} if isinstance(engines, FleetLink) else engines,
            clock,
            index=self._index,
            changed=self._waiting.tell,
            link=link,
        )
        self._choices = MoveCounts()
        self._copies = PrefixCopies(self._index, self._units.replicas, clock, self._choices)
        self._program = program
        self._clock = clock
        self._tell = tell
        self.begun = 0
        """Requests so far."""
        self.sessions: dict[str, Session] = {}
        """The requests that are under way, by the ids that their callers gave them."""

    async def __aenter__(self) -> Self:
        """Units that cannot be reached yet are asked until they can be."""
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._units.watch(self._tasks)
        self._copying = self._tasks.create_task(self._copies.watch())
        try:
            await self._units.ask()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._copying.cancel()
        self._units.unwatch()
        await self._tasks.__aexit__(None, None, None)  # releases end, and `error` goes on as it is

    # -- Server -----------------------------------------------------------------------------------------

    async def models(self) -> list[ModelCard]:
        """Returns one card a name, with the shortest context of its replicas. Raises Unavailable if two units
        serve different models under one name, or if no unit has been reached yet."""
        cards: dict[str, ModelCard] = {}
        for unit in self._units.values():
            if isinstance(unit.problem, ConfigError):
                raise Unavailable(unit.problem.message)
            for name, replica in unit.replicas.items():
                card = cards.setdefault(name, replica.card)
                shortest = min(card.context_length, replica.card.context_length)
                cards[name] = replace(card, context_length=shortest)
        if not cards:
            raise Unavailable(f"no unit is up (of {', '.join(self._units)})", retry_after=1)
        return list(cards.values())

    def start_generate(self, body: StartGenerate) -> Frames:
        """Returns what the current program makes of the request, however often engines fail it: see
        `Session.frames`."""
        self.begun += 1
        serving = partial(self._serving, body)
        session = Session(
            body, serving, self._waiting, self._clock, self._tasks, self._quarantine, self._tell
        )
        return session.frames(self._program, self.sessions)

    async def abort(self, request: str, choice: int | None = None) -> None:
        session = self.sessions.get(request)
        if session is not None:
            await session.abort(choice)
            self._waiting.tell_one(session.model, request)

    @property
    def busy(self) -> bool:
        """True while a request is under way."""
        return bool(self.sessions)

    async def abort_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for request in list(self.sessions):
                group.create_task(self.abort(request))

    async def move(self, request: str, to: str) -> None:
        """Lets a request that decodes or waits go on at another unit; its caller sees nothing of it. Raises
        KvloomError if it stays."""
        session, unit = self.sessions.get(request), self._units.get(to)
        source = session.running if session else None
        target = unit.replicas.get(session.model) if session and unit else None
        if session is None or source is None:
            raise BadRequest(f"request {request} does not run here", param="request")
        if target is None or target is source.replica:
            where = "it runs there already" if target else "that does not serve its model"
            raise BadRequest(f"request {request} cannot go to {to}: {where}", param="to")
        if not target.up:
            raise BadRequest(f"request {request} cannot go to {to}: it takes no requests", param="to")
        if target.card.context_length < session.candidates.needs:
            raise BadRequest(f"request {request} may not fit {to}: its contexts are shorter", param="to")
        if session.migrating or session.following:
            raise BadRequest(f"request {request} moves already", param="request")
        session.migrating = True
        try:
            migration = Migration(session, source, target, self._clock)
            if migration.context:
                migration.copies = await self._copies_sooner(request, source.replica, to, migration.context)
            await migration.run()
        finally:
            session.migrating = False

    async def _copies_sooner(self, request: str, source: Replica, to: str, context: int) -> bool:
        """Returns whether so many tokens of a running request's context are to be copied to the unit `to`, or
        computed there again. Raises Unavailable if the request is better off where it is; one whose unit is
        to be emptied never is."""
        units = [unit for name in (source.name, to) if (unit := self._units.get(name))]
        loads = await self._units.loads(units)
        terms = MoveTerms.of(source.card.name, loads.get(source.name), to, loads.get(to))
        reason = self._choices.judge("request", terms, context, LONGEST_PAUSE)
        if reason == "neither" and source.up:
            raise Unavailable(
                f"request {request} stays: {context} tokens of context are copied to {to} too slowly, and "
                "computed there too slowly for its stream to stand still"
            )
        return reason != "computing"

    @property
    def choices(self) -> Mapping[tuple[str, str], int]:
        return {(what, reason): count for (what, reason), count in self._choices.counts.items()}

    @property
    def moving(self) -> list[str]:
        """Returns the requests that migrate just now, by the ids that they have at the replicas."""
        return [session.name for session in self.sessions.values() if session.migrating]

    def asked_as(self, name: str) -> str | None:
        """Returns the request that has this id at the replicas now; None if no request here has it."""
        return next((request for request, session in self.sessions.items() if session.name == name), None)

    # -- what only a router has -------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        return self._program

    def set_program(self, program: Program) -> None:
        """Sets the program for requests from now on; those in flight end under the one they began with."""
        self._program = program

    async def loads(self) -> dict[str, UnitLoad]:
        """Returns the loads by unit, of those that answer soon, the drained ones too, and those that are
        emptied for a restart."""
        return await self._units.loads(
            unit
            for unit in self._units.values()
            if unit.service not in NO_PROCESS or (unit.service == "restarting" and unit.calls)
        )

    @property
    def services(self) -> dict[str, Service]:
        return {name: unit.service for name, unit in self._units.items()}

    @property
    def awaited(self) -> list[str]:
        return [name for name, unit in self._units.items() if unit.awaited]

    @property
    def units(self) -> Units:
        return self._units

    @property
    def waiting(self) -> dict[str, int]:
        """Requests that nobody can answer yet, by model."""
        return self._waiting.waiting

    def _serving(self, body: StartGenerate) -> Fleet:
        """Returns the replicas of the request's model as they are now. Raises UnknownModel if there are
        none."""
        replicas = self._units.replicas(body.model)
        if not replicas:
            raise UnknownModel.named(body.model, self._units.models)
        arrival = arriving(body)
        return Fleet(
            body.model, replicas, self._index, arrival, self._copies, body.salt, choices=self._choices
        )
