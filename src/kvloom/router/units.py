"""The units that a router knows, whether they have a process or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from kvloom.router.prefix_index import PrefixIndex
from kvloom.router.replicas import Replica
from kvloom.router.unit import Unit
from kvloom.types.client import EngineClient
from kvloom.types.clock import Clock
from kvloom.types.errors import ConfigError, Conflict
from kvloom.types.load import UnitLoad
from kvloom.types.request import ModelCard

REPORT_SECONDS: Final = 1.0  # for which a report of all loads waits for each of them
_SPOKEN: Final = ("vocab_size", "tokenizer", "special_tokens", "eos_token_ids", "bos_token_id", "add_bos")


class Units(Mapping[str, Unit]):
    """By name. changed: called whenever one is up, or is not to be waited for any more. withdrawn, away: as
    `Router` has them."""

    def __init__(
        self,
        engines: Mapping[str, EngineClient],
        clock: Clock,
        *,
        index: PrefixIndex,
        changed: Callable[[], None],
        withdrawn: Collection[str],
        away: Mapping[str, Sequence[ModelCard]],
    ) -> None:
        self._clock = clock
        self._index = index
        self._changed = changed
        self._tasks: asyncio.TaskGroup | None = None  # until they are watched
        self._watches: dict[str, Sequence[asyncio.Task[None]]] = {}
        self._asked: dict[Unit, asyncio.Task[UnitLoad | None]] = {}  # for their loads
        self._said: dict[Unit, UnitLoad | None] = {}
        self._late: set[Unit] = set()  # whose last answer is still to come
        self._units = {
            name: self._unit(name, client, away.get(name), withdrawn=name in withdrawn)
            for name, client in engines.items()
        }

    def __getitem__(self, name: str) -> Unit:
        return self._units[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)

    async def ask(self) -> None:
        """All that have a process."""
        async with asyncio.TaskGroup() as asking:
            for unit in self.values():
                if unit.presence == "here":
                    asking.create_task(unit.ask())

    async def loads(self, units: Iterable[Unit]) -> dict[str, UnitLoad]:
        """By unit, of those that answer: as they are now, not when somebody else asked. Who is late by
        REPORT_SECONDS counts with what it last said until it is lost, and is not asked again meanwhile: one
        that hangs costs the others little."""
        units = list(units)
        earlier = [
            task
            for unit in units
            if unit not in self._late and (task := self._asked.get(unit)) and not task.done()
        ]
        if earlier:
            await asyncio.wait(earlier, timeout=REPORT_SECONDS)
        if self._tasks is None:
            return {}
        asked = {unit: self._asking(unit, self._tasks) for unit in units}
        if asked:
            await asyncio.wait(asked.values(), timeout=REPORT_SECONDS)
        for unit, task in asked.items():
            if self._asked.get(unit) is not task:
                continue
            if task.done():
                self._late.discard(unit)
                self._said[unit] = None if task.cancelled() else task.result()
            else:
                self._late.add(unit)
        return {unit.name: load for unit in asked if (load := self._said.get(unit))}

    def _asking(self, unit: Unit, tasks: asyncio.TaskGroup) -> asyncio.Task[UnitLoad | None]:
        asked = self._asked.get(unit)
        if asked is None or asked.done():
            asked = self._asked[unit] = tasks.create_task(unit.load())
        return asked

    def watch(self, tasks: asyncio.TaskGroup) -> None:
        """From now on until `unwatch`."""
        self._tasks = tasks
        for unit in self.values():
            self._watch(unit, tasks)

    def unwatch(self) -> None:
        self._tasks = None
        for name in list(self._watches):
            self._unwatch(name)
        for asked in self._asked.values():
            asked.cancel()

    def add(self, name: str, client: EngineClient) -> Unit:
        """A unit that has no process yet. Raises Conflict."""
        if name in self._units:
            raise Conflict(f"there is a unit {name} already; another name is right")
        unit = self._units[name] = self._unit(name, client, (), withdrawn=False)
        if self._tasks is not None:
            self._watch(unit, self._tasks)
        return unit

    def remove(self, name: str) -> None:
        """Raises Conflict while it has a process, or a call is in flight there."""
        unit = self._units[name]
        if unit.presence != "away" or unit.calls:
            raise Conflict(f"{name} is {unit.service}; a unit that is away can be removed")
        self._unwatch(name)
        del self._units[name]
        self._lost(unit)
        self._late.discard(unit)
        if asked := self._asked.pop(unit, None):
            asked.cancel()
        unit.gone("removed")

    def replicas(self, model: str) -> tuple[Replica, ...]:
        return tuple(unit.replicas[model] for unit in self.values() if model in unit.replicas)

    @property
    def models(self) -> list[str]:
        return sorted({name for unit in self.values() for name in unit.replicas})

    def _unit(
        self, name: str, client: EngineClient, away: Sequence[ModelCard] | None, *, withdrawn: bool
    ) -> Unit:
        return Unit(
            name,
            client,
            self._clock,
            admit=self._admit,
            lost=self._lost,
            changed=self._changed,
            withdrawn=withdrawn,
            away=away,
        )

    def _watch(self, unit: Unit, tasks: asyncio.TaskGroup) -> None:
        watches = unit.watch, unit.report.watch
        self._watches[unit.name] = [tasks.create_task(watch()) for watch in watches]

    def _unwatch(self, name: str) -> None:
        for watch in self._watches.pop(name, ()):
            watch.cancel()

    def _admit(self, newcomer: Unit, cards: Sequence[ModelCard]) -> None:
        """Raises ConfigError where it would answer for a model with another's tokens."""
        for card in cards:
            for other in self.replicas(card.name):
                if other.name == newcomer.name:
                    continue
                for field in _SPOKEN:
                    if getattr(card, field) != getattr(other.card, field):
                        raise ConfigError(
                            f"{card.name} differs in {field} between {other.name} and {newcomer.name}; "
                            "replicas of one model, or models of two names, are right"
                        )

    def _lost(self, unit: Unit) -> None:
        self._index.forget(unit.name)
        self._said.pop(unit, None)
        unit.report.forget()
