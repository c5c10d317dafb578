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
    OutOfBlocks,
    QueueFull,
    Unavailable,
    UnknownModel,
)
from kvloom.core.load import UnitLoad
from kvloom.core.request import ModelCard, StartGenerate
from kvloom.router.call import Call, Frames, Lost
from kvloom.router.fleet import Fleet
from kvloom.router.prefix_index import PrefixIndex
from kvloom.router.program import Program
from kvloom.router.programs.least_loaded import least_loaded
from kvloom.router.unit import Unit

Attempt = Callable[[Call, Fleet], Frames]

_log = logging.getLogger(__name__)
_ELSEWHERE: Final = (Unavailable, QueueFull, OutOfBlocks, Lost)  # what one replica says, another may not
_SPOKEN: Final = ("vocab_size", "tokenizer", "special_tokens", "eos_token_ids", "bos_token_id", "add_bos")


class Router:
    """Satisfies `Server`. An async context manager: it watches its units while it is open. withdrawn: units
    that take no part until they are admitted."""

    def __init__(
        self,
        engines: Mapping[str, EngineClient],
        program: Program,
        clock: Clock,
        *,
        withdrawn: Collection[str] = (),
    ) -> None:
        self._index = PrefixIndex()
        self._units = {
            name: Unit(name, client, clock, admit=self._admit, lost=self._lost, withdrawn=name in withdrawn)
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
        self._watches = [self._tasks.create_task(unit.watch()) for unit in self._units.values()]
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
        """What the current program makes of it. Where that fails before the first event, the replicas that
        are up are asked to generate all of it, the least loaded first."""
        if body.request in self._calls:
            raise BadRequest(f"request id {body.request} is in use", param="request")
        fleet = self._fleet(body.model)
        call = self._calls[body.request] = Call(body, fleet, self._clock, self._tasks)
        program = self._program
        # What is received has K and V but no logits: who wants the prompt's has it computed in one place.
        attempt: Attempt = program if body.sampling.prompt_logprobs is None else least_loaded
        try:
            while True:
                try:
                    async with aclosing(attempt(call, fleet)) as frames:
                        async for frame in frames:
                            yield frame
                    break
                except KvloomError as error:
                    fleet = fleet.without(call.refused)
                    if not (_may_go_on(call, error) and fleet.up):
                        raise
                    _log.warning("request %s: %s; it goes elsewhere", body.request, error.message)
                    attempt = least_loaded
                await call.release()
            if not call.answered:
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

    # -- what only a router has -------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        return self._program

    def set_program(self, program: Program) -> None:
        """For requests from now on; those in flight end under the one they began with."""
        self._program = program

    async def loads(self) -> dict[str, UnitLoad]:
        """By unit, of those that answer."""
        async with asyncio.TaskGroup() as group:
            asked = {unit.name: group.create_task(unit.load()) for unit in self._units.values() if unit.up}
        return {name: load for name, task in asked.items() if (load := task.result())}

    @property
    def up(self) -> dict[str, bool]:
        """By unit: whether it takes part."""
        return {name: unit.up for name, unit in self._units.items()}

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


def _may_go_on(call: Call, error: KvloomError) -> bool:
    """True where a plain start_generate elsewhere may still answer: nothing has been passed on, and it is not
    the request itself that a replica has refused."""
    return not call.answered and (not call.refused or isinstance(error, _ELSEWHERE))
