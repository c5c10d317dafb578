"""The router: many engines to whoever asks as one, and a program that says which of them does what."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Final, Self

from msgspec.structs import replace

from kvloom.core.client import EngineClient
from kvloom.core.clock import Clock
from kvloom.core.errors import (
    BadRequest,
    ConfigError,
    KvloomError,
    Unavailable,
    UnknownModel,
)
from kvloom.core.load import UnitLoad
from kvloom.core.request import ModelCard, StartGenerate
from kvloom.core.service import Service
from kvloom.router.call import Call, Frames
from kvloom.router.failures import Failures
from kvloom.router.fleet import Fleet
from kvloom.router.moving import Move
from kvloom.router.prefix_index import PrefixIndex
from kvloom.router.program import Program
from kvloom.router.programs.least_loaded import least_loaded
from kvloom.router.unit import Unit
from kvloom.router.waiting import WaitingRoom

Attempt = Callable[[Call, Fleet], Frames]

_log = logging.getLogger(__name__)
_SPOKEN: Final = ("vocab_size", "tokenizer", "special_tokens", "eos_token_ids", "bos_token_id", "add_bos")


class Router:
    """Satisfies `Server`. An async context manager: it watches its units while it is open. withdrawn: units
    that take no part until they are admitted. patience: seconds for which a request waits where nobody that
    serves its model is up, but somebody is being restarted."""

    def __init__(
        self,
        engines: Mapping[str, EngineClient],
        program: Program,
        clock: Clock,
        *,
        withdrawn: Collection[str] = (),
        patience: float = 120.0,
    ) -> None:
        self._index = PrefixIndex()
        self._waiting = WaitingRoom(patience)
        self._units = {
            name: Unit(
                name,
                client,
                clock,
                admit=self._admit,
                lost=self._lost,
                changed=self._waiting.tell,
                withdrawn=name in withdrawn,
            )
            for name, client in engines.items()
        }
        self._program = program
        self._clock = clock
        self._calls: dict[str, Call] = {}

    async def __aenter__(self) -> Self:
        """Units that cannot be reached yet are asked until they can be."""
        async with asyncio.TaskGroup() as asking:
            for unit in self._units.values():
                asking.create_task(unit.ask())
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._watches = [
            self._tasks.create_task(watch())
            for unit in self._units.values()
            for watch in (unit.watch, unit.report.watch)
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for watch in self._watches:
            watch.cancel()
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
        fleet = self._fleet(body.model)
        call = self._calls[body.request] = Call(body, fleet, self._clock, self._tasks)
        program = self._program
        # What is received has K and V but no logits: who wants the prompt's has it computed in one place.
        attempt: Attempt = program if body.sampling.prompt_logprobs is None else least_loaded
        failures = Failures(call)
        try:
            while True:
                await self._until_somebody_is_up(call, fleet, failures)
                if call.let_in and call.progress.unwanted:
                    yield call.progress.end_unwanted()
                    if call.progress.over:
                        break
                    continue
                try:
                    async with aclosing(attempt(call, fleet)) as frames:
                        async for frame in frames:
                            yield frame
                    break
                except KvloomError as error:
                    fleet = failures.keep(fleet, error)
                    over = call.aborted and call.let_in  # its ends are told next
                    if not (over or (failures.may_go_on(error) and (fleet.up or failures.awaited(fleet)))):
                        raise
                    if not over:
                        whither = "goes elsewhere" if fleet.up else "waits for a restart"
                        _log.warning("request %s: %s; it %s", body.request, error.message, whither)
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
            self._waiting.tell()

    async def move(self, request: str, to: str) -> None:
        """Let a request that decodes go on at another unit; its caller sees nothing of it. Raises KvloomError
        where it stays."""
        call, unit = self._calls.get(request), self._units.get(to)
        source = call.running if call else None
        target = unit.replicas.get(call.model) if call and unit else None
        if call is None or source is None:
            raise BadRequest(f"request {request} does not run here", param="request")
        if target is None or target is source:
            where = "it runs there already" if target else "that does not serve its model"
            raise BadRequest(f"request {request} cannot go to {to}: {where}", param="to")
        if not target.up:
            raise BadRequest(f"request {request} cannot go to {to}: it takes no requests", param="to")
        if target.card.context_length < call.needs:
            raise BadRequest(f"request {request} may not fit {to}: its contexts are shorter", param="to")
        if call.moving:
            raise BadRequest(f"request {request} moves already", param="request")
        call.moving = True
        try:
            await Move(call, source, target, self._clock).run()
        finally:
            call.moving = False

    def asked_as(self, name: str) -> str | None:
        """The request, by the id that it has at the replicas now; None where none here has it."""
        return next((request for request, call in self._calls.items() if call.name == name), None)

    async def _until_somebody_is_up(self, call: Call, fleet: Fleet, failures: Failures) -> None:
        """Or nobody will be soon. Raises Unavailable where that takes too long."""
        try:
            await self._waiting.wait_while(
                lambda: bool(
                    failures.awaited(fleet)
                    and not fleet.up
                    and not call.aborted
                    and not call.progress.unwanted
                )
            )
        except TimeoutError:
            names = ", ".join(replica.name for replica in failures.awaited(fleet))
            raise Unavailable(
                f"no unit that serves {fleet.model} is up; {names} is being restarted, which takes longer "
                f"than the {self._waiting.seconds:g} s that requests wait",
                retry_after=1,
            ) from None

    # -- what only a router has -------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        return self._program

    def set_program(self, program: Program) -> None:
        """For requests from now on; those in flight end under the one they began with."""
        self._program = program

    async def loads(self) -> dict[str, UnitLoad]:
        """By unit, of those that answer, the drained ones too."""
        async with asyncio.TaskGroup() as group:
            asked = {
                unit.name: group.create_task(unit.load())
                for unit in self._units.values()
                if unit.service not in ("down", "restarting")
            }
        return {name: load for name, task in asked.items() if (load := task.result())}

    @property
    def services(self) -> dict[str, Service]:
        return {name: unit.service for name, unit in self._units.items()}

    @property
    def units(self) -> Mapping[str, Unit]:
        return self._units

    def withdraw(self, unit: str) -> None:
        """Give it no new request, though it may answer: it is about to end. What runs there goes on."""
        self._units[unit].withdraw()

    async def admit(self, unit: str) -> None:
        """It serves, perhaps as a new process. Where it does not answer, it is asked until it does."""
        await self._units[unit].admit()

    # -- units ------------------------------------------------------------------------------------------

    def _fleet(self, model: str) -> Fleet:
        replicas = tuple(unit.replicas[model] for unit in self._units.values() if model in unit.replicas)
        if not replicas:
            served = sorted({name for unit in self._units.values() for name in unit.replicas})
            raise UnknownModel(
                f"the model `{model}` is not served; served: {', '.join(served) or 'none'}", param="model"
            )
        return Fleet(model, replicas, self._index)

    def _admit(self, newcomer: Unit, cards: Sequence[ModelCard]) -> None:
        """Raises ConfigError where it would answer for a model with another's tokens."""
        for card in cards:
            for unit in self._units.values():
                other = unit.replicas.get(card.name)
                if unit is newcomer or other is None:
                    continue
                for field in _SPOKEN:
                    if getattr(card, field) != getattr(other.card, field):
                        raise ConfigError(
                            f"{card.name} differs in {field} between {unit.name} and {newcomer.name}; "
                            "replicas of one model, or models of two names, are right"
                        )

    def _lost(self, unit: Unit) -> None:
        self._index.forget(unit.name)
        unit.report.forget()
