"""The router: many engines to whoever asks as one, and a program that says which of them does what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from kvloom.router.call import Call, Frames
from kvloom.router.candidates import Candidates
from kvloom.router.course import arriving
from kvloom.router.fleet import Fleet
from kvloom.router.moving import Move
from kvloom.router.prefix_index import PrefixIndex
from kvloom.router.program import Program
from kvloom.router.programs.least_loaded import least_loaded
from kvloom.router.units import FleetLink, Units
from kvloom.router.waiting import WaitingRoom
from kvloom.types.client import EngineClient
from kvloom.types.clock import Clock
from kvloom.types.errors import BadRequest, ConfigError, KvloomError, Unavailable, UnknownModel
from kvloom.types.load import UnitLoad
from kvloom.types.request import ModelCard, StartGenerate
from kvloom.types.service import NO_PROCESS, PATIENCE, Service, UnitState

Attempt = Callable[[Call, Fleet], Frames]


class Router:
    """Satisfies `Server`. An async context manager: it watches its units while it is open."""

    def __init__(
        self,
        engines: Mapping[str, EngineClient] | FleetLink,
        program: Program,
        clock: Clock,
        *,
        patience: float = PATIENCE,
    ) -> None:
        """engines: the units and how they are reached, or a link to the controller that says which there are.
        patience: seconds for which a request waits if nobody that serves its model is up, but somebody will
        be."""
        self._index = PrefixIndex()
        self._waiting = WaitingRoom(patience)
        link = engines if isinstance(engines, FleetLink) else None
        self._units = Units(
            {} if isinstance(engines, FleetLink) else engines,
            clock,
            index=self._index,
            changed=self._waiting.tell,
            link=link,
        )
        self._program = program
        self._clock = clock
        self._calls: dict[str, Call] = {}

    async def __aenter__(self) -> Self:
        """Units that cannot be reached yet are asked until they can be."""
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._units.watch(self._tasks)
        try:
            await self._units.ask()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._units.unwatch()
        await self._tasks.__aexit__(None, None, None)  # releases end, and `error` goes on as it is

    # -- Server -----------------------------------------------------------------------------------------

    async def models(self) -> list[ModelCard]:
        """One card a name, with the shortest context of its replicas. Raises Unavailable where two units
        serve different models under one name, and where no unit has been reached yet."""
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

    async def start_generate(self, body: StartGenerate) -> Frames:
        """What the current program makes of it. Where that fails, wherever the request stands, the replicas
        that are up are asked to generate the rest of it, the least loaded first. Where none is up, but one
        will be, the request waits for that: what it was refused there does not count."""
        if body.request in self._calls:
            raise BadRequest(f"request id {body.request} is in use", param="request")
        fleet = self._served(body)
        call = self._calls[body.request] = Call(body, fleet, self._clock, self._tasks)
        candidates = Candidates(call, fleet, lambda: self._fleet(body), self._waiting)
        program = self._program
        # What is received has K and V but no logits: who wants the prompt's has it computed in one place.
        attempt: Attempt = program if body.sampling.prompt_logprobs is None else least_loaded
        try:
            while True:
                await candidates.until_somebody_is_up()
                if call.progress.unwanted:
                    yield call.progress.end_unwanted()
                    if call.progress.over:
                        break
                    continue
                try:
                    async with aclosing(attempt(call, candidates.fleet)) as frames:
                        async for frame in frames:
                            yield frame
                    break
                except KvloomError as error:
                    candidates.go_on_after(error)
                    attempt = least_loaded
                await call.release()
            if not call.progress.over:
                raise KvloomError(f"the program {program.name} ended without an answer")
        finally:
            try:
                await call.release()
            finally:
                del self._calls[body.request]

    async def abort(self, request: str, choice: int | None = None) -> None:
        call = self._calls.get(request)
        if call is not None:
            await call.abort(choice)
            self._waiting.tell_one(request)

    async def abort_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for request in list(self._calls):
                group.create_task(self.abort(request))

    async def move(self, request: str, to: str) -> None:
        """Let a request that decodes or waits go on at another unit; its caller sees nothing of it. Raises
        KvloomError where it stays."""
        call, unit = self._calls.get(request), self._units.get(to)
        source = call.course.running if call else None
        target = unit.replicas.get(call.model) if call and unit else None
        if call is None or source is None:
            raise BadRequest(f"request {request} does not run here", param="request")
        if target is None or target is source:
            where = "it runs there already" if target else "that does not serve its model"
            raise BadRequest(f"request {request} cannot go to {to}: {where}", param="to")
        if not target.up:
            raise BadRequest(f"request {request} cannot go to {to}: it takes no requests", param="to")
        if target.card.context_length < call.course.needs:
            raise BadRequest(f"request {request} may not fit {to}: its contexts are shorter", param="to")
        if call.moving:
            raise BadRequest(f"request {request} moves already", param="request")
        call.moving = True
        try:
            await Move(call, source, target, self._clock).run()
        finally:
            call.moving = False

    @property
    def moving(self) -> list[str]:
        """Requests that move just now, by the ids that they have at the replicas."""
        return [call.name for call in self._calls.values() if call.moving]

    def asked_as(self, name: str) -> str | None:
        """The request, by the id that it has at the replicas now; None where none here has it."""
        return next((request for request, call in self._calls.items() if call.name == name), None)

    # -- what only a router has -------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        return self._program

    def set_program(self, program: Program) -> None:
        """For requests from now on; those in flight end under the one they began with."""
        self._program = program

    async def loads(self) -> dict[str, UnitLoad]:
        """By unit, of those that answer soon, the drained ones too, and those that are emptied for a
        restart."""
        return await self._units.loads(
            unit
            for unit in self._units.values()
            if unit.service not in NO_PROCESS or (unit.service == "restarting" and unit.calls)
        )

    def state(self, unit: str) -> UnitState:
        """Returns how a unit stands."""
        return self._units.state(unit)

    async def settled(self, unit: str) -> None:
        """Waits until a unit that is to be asked what it serves was asked."""
        await self._units.settled(unit)

    @property
    def services(self) -> dict[str, Service]:
        return {name: unit.service for name, unit in self._units.items()}

    @property
    def units(self) -> Units:
        return self._units

    @property
    def waiting(self) -> dict[str, int]:
        """Requests that nobody can answer yet, by model."""
        return {model: count for model, count in self._waiting.waiting.items() if count}

    def withdraw(self, unit: str) -> None:
        """Give it no new request, though it may answer: it is about to end. What runs there goes on."""
        self._units[unit].withdraw()

    async def admit(self, unit: str) -> None:
        """It serves, perhaps as a new process. Where it does not answer, it is asked until it does."""
        await self._units[unit].admit()

    # -- units ------------------------------------------------------------------------------------------

    def _fleet(self, body: StartGenerate) -> Fleet:
        return Fleet(body.model, self._units.replicas(body.model), self._index, arriving(body))

    def _served(self, body: StartGenerate) -> Fleet:
        fleet = self._fleet(body)
        if not fleet.replicas:
            served = ", ".join(self._units.models) or "none"
            raise UnknownModel(f"the model `{body.model}` is not served; served: {served}", param="model")
        return fleet
