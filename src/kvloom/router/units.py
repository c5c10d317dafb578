"""The units that a router knows, whether they have a process or not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvloom.cluster.adapters import load_at
from kvloom.cluster.launcher import Counted, UnitSeen
from kvloom.cluster.mirror import Mirror
from kvloom.cluster.state import ABSENT, ComponentStatus, is_counted, outlook
from kvloom.kv.prefix_index import PrefixIndex
from kvloom.router.replicas import Replica
from kvloom.router.unit import Unit
from kvloom.types.client import EngineClient
from kvloom.types.clock import Clock
from kvloom.types.errors import ConfigError, KvloomError, Unavailable
from kvloom.types.load import UnitLoad
from kvloom.types.request import ModelCard
from kvloom.types.service import UnitState
from kvloom.types.spec import AdapterSpec

REPORT_SECONDS: Final = 1.0  # for which a report of all loads waits for each of them
_SPOKEN: Final = ("vocab_size", "tokenizer", "special_tokens", "eos_token_ids", "bos_token_id", "add_bos")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FleetLink:
    """Tells a router of its units, from the fleet's controller."""

    mirror: Mirror
    connect: Callable[[str], EngineClient]
    """Returns the client of a unit."""
    cards: Callable[[str], Sequence[ModelCard]] = lambda _: ()
    """Returns what a unit without a process has served, as far as that is kept."""
    keep: Callable[[str, Sequence[ModelCard]], Awaitable[None]] | None = None
    """Keeps what a unit serves, as its present process has told."""


class Units(Mapping[str, Unit]):
    """Holds the units by name. If there is a mirror, they are the mirror's units and stand as it says."""

    def __init__(
        self,
        engines: Mapping[str, EngineClient],
        clock: Clock,
        *,
        index: PrefixIndex,
        changed: Callable[[Iterable[str]], None],
        link: FleetLink | None = None,
    ) -> None:
        """engines: the units' clients, if there is no link to a controller; changed: called with
        models for which a unit is up, or is not to be waited for any more."""
        self._clock = clock
        self._index = index
        self._changed = changed
        self._link = link
        self._tasks: asyncio.TaskGroup | None = None  # until they are watched
        self._watches: dict[str, Sequence[asyncio.Task[None]]] = {}
        self._asked: dict[Unit, asyncio.Task[UnitLoad | None]] = {}  # for their loads
        self._said: dict[Unit, UnitLoad | None] = {}
        self._late: set[Unit] = set()  # whose last answer is still to come
        self._coming: dict[str, asyncio.Task[None]] = {}  # Units that are being asked what they serve.
        self._withdrawn: set[str] = set()  # Units that get no new requests, as the controller knows.
        self._units = {name: self._unit(name, client) for name, client in engines.items()}
        if link is not None:
            link.mirror.follow(self._heed)

    def __getitem__(self, name: str) -> Unit:
        return self._units[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)

    async def ask(self) -> None:
        """Asks all units that have a process what they serve, and waits for their answers."""
        if self._link is not None:
            mirror = self._link.mirror
            self._heed([*mirror.spec.units])
            while self._coming:
                await asyncio.wait(self._coming.values())
            self._count(self._link)
            return
        async with asyncio.TaskGroup() as asking:
            for unit in self.values():
                asking.create_task(unit.ask())

    async def settled(self, name: str) -> None:
        """Waits until a unit that is being asked what it serves has answered, or has not."""
        if task := self._coming.get(name):
            await asyncio.wait([task])

    def client(self, name: str) -> EngineClient:
        """Returns the client of a unit."""
        return self._units[name].client

    async def ask_again(self, name: str) -> None:
        """Asks a unit what it serves, and waits for its answer."""
        if unit := self._units.get(name):
            await unit.ask()

    async def loads(self, units: Iterable[Unit]) -> dict[str, UnitLoad]:
        """Returns the loads of the units that answer, as they are now and not as somebody else was told. A
        unit that is late by REPORT_SECONDS counts with what it last said until it is lost, and is not asked
        again meanwhile: a unit that hangs costs the others little."""
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
        """Asks the units for all that is to be known of them, from now on until `unwatch`."""
        self._tasks = tasks
        for unit in self.values():
            self._watch(unit, tasks)

    def unwatch(self) -> None:
        self._tasks = None
        for name in list(self._watches):
            self._unwatch(name)
        for task in (*self._asked.values(), *self._coming.values()):
            task.cancel()

    def state(self, name: str) -> UnitState:
        """Returns how a unit stands, with the models that it serves, or is to serve if it has told of
        none."""
        unit, spec = self._units[name], None
        if self._link is not None:
            spec = self._link.mirror.spec.units.get(name)
        specified = sorted(spec.engine.served) if spec is not None else []
        return UnitState(
            name=name,
            state=unit.service,
            calls=unit.calls,
            models=tuple(unit.replicas) or tuple(specified),
            problem=unit.problem.message if unit.problem else "",
        )

    def replicas(self, model: str) -> tuple[Replica, ...]:
        return tuple(unit.replicas[model] for unit in self._units.values() if model in unit.replicas)

    @property
    def models(self) -> list[str]:
        return sorted({name for unit in self.values() for name in unit.replicas})

    def _unit(self, name: str, client: EngineClient, cards: Sequence[ModelCard] = ()) -> Unit:
        return Unit(
            name,
            client,
            self._clock,
            index=self._index,
            admit=self._admit,
            lost=self._lost,
            changed=lambda models: self._unit_changed(name, models),
            emptied=lambda: self._emptied(name),
            managed=self._link is not None,
            cards=cards,
        )

    def _unit_changed(self, name: str, models: Iterable[str]) -> None:
        """Tells the controller, too, if a unit answers of which it has last heard that it did not."""
        link, unit = self._link, self._units.get(name)
        if link is not None and unit is not None and unit.up:
            process = link.mirror.process(name)
            if process.phase == "ready" and process.problem:
                link.mirror.send(UnitSeen(name, process.generation))
        self._changed(models)

    def _heed(self, names: Collection[str]) -> None:
        """Takes in what the mirror has of these units, because something of them has changed."""
        link = self._link
        if link is None or self._tasks is None:
            return  # They are asked when they are watched.
        units, mirror = link.mirror.spec.units, link.mirror
        for name in names:
            if name in units:
                self._stand(name, link)
            elif name in self._units and mirror.process(name).phase == "absent":
                self._drop(name)
        self._withdraw(names, link)

    def _stand(self, name: str, link: FleetLink) -> None:
        spec, process = link.mirror.spec.units[name], link.mirror.process(name)
        unit = self._units.get(name)
        if unit is None:
            served = spec.engine.served  # The name may have been another unit's.
            cards = [card for card in link.cards(name) if card.name in served]
            unit = self._units[name] = self._unit(name, link.connect(name), cards)
            if self._tasks is not None:
                self._watch(unit, self._tasks)
        if "engine" in spec.changed or spec.removed:
            unit.keep_only(set() if spec.removed else spec.engine.served)
        # One on a node may be told of anew by another controller, which has a number of its own for it.
        which = (process.node, process.pid, process.endpoint) if process.node else process.serial
        life = process.generation, which
        text = process.lack or process.problem
        problem = Unavailable(text) if text else None
        stands = outlook(spec, process)
        if unit.stand(stands, drained=spec.drained, life=life, problem=problem):
            assert self._tasks is not None
            task = self._coming[name] = self._tasks.create_task(self._come(unit, process, link))
            task.add_done_callback(lambda task: self._came(name, task))
        elif unit.up and stands == "here" and name not in self._coming and self._lacking(unit, link):
            assert self._tasks is not None
            task = self._coming[name] = self._tasks.create_task(self._adapt(unit, link))
            task.add_done_callback(lambda task: self._came(name, task))
        elif unit.up and stands == "here" and not process.seen:  # a controller that was away has not heard it
            link.mirror.send(UnitSeen(name, process.generation))

    async def _come(self, unit: Unit, process: ComponentStatus, link: FleetLink) -> None:
        await unit.ask()
        if unit.up:
            await self._adapt(unit, link)
        problem = unit.problem.message if unit.problem else ""
        link.mirror.send(UnitSeen(unit.name, process.generation, problem))
        if link.keep is not None and unit.problem is None:
            await link.keep(unit.name, [replica.card for replica in unit.replicas.values()])

    def _lacking(self, unit: Unit, link: FleetLink) -> list[tuple[str, AdapterSpec]]:
        """Returns the adapters, each with its base, that a unit is to serve and does not: they were loaded
        while its process started."""
        spec = link.mirror.spec.units.get(unit.name)
        return [
            (model.name, adapter)
            for model in (() if spec is None else spec.engine.models)
            for adapter in model.adapters
            if model.name in unit.replicas and adapter.name not in unit.replicas
        ]

    async def _adapt(self, unit: Unit, link: FleetLink) -> None:
        """Lets a unit serve the adapters that it lacks. One that it refuses is tried again when something of
        the unit has changed."""
        if not (lacking := self._lacking(unit, link)):
            return
        for base, adapter in lacking:
            try:
                await load_at(unit.name, unit.client, base, adapter)
            except KvloomError as error:
                _log.error("the adapter %s is not served: %s", adapter.name, error.message)
        await unit.ask()

    def _came(self, name: str, task: asyncio.Task[None]) -> None:
        if self._coming.get(name) is task:
            del self._coming[name]

    def _drop(self, name: str) -> None:
        unit = self._units.pop(name)
        self._unwatch(name)
        unit.keep_only(set())
        unit.stand("away", drained=False, life=None, problem=None)
        self._late.discard(unit)
        if asked := self._asked.pop(unit, None):
            asked.cancel()

    def _withdraw(self, names: Collection[str], link: FleetLink) -> None:
        """Lets the controller know the calls of those that get no new requests."""
        units, processes = link.mirror.spec.units, link.mirror.status.processes
        told = False
        for name in names:
            if name in self._units and is_counted(units.get(name), processes.get(name, ABSENT)):
                self._withdrawn.add(name)
                told = True
            elif name in self._withdrawn:
                self._withdrawn.discard(name)
                told = True
        if told:
            self._count(link)

    def _emptied(self, name: str) -> None:
        if self._link is not None and name in self._withdrawn:
            self._count(self._link)

    def _count(self, link: FleetLink) -> None:
        calls = {name: self._units[name].calls for name in sorted(self._withdrawn)}
        link.mirror.send(Counted(link.mirror.seq, calls))

    def _watch(self, unit: Unit, tasks: asyncio.TaskGroup) -> None:
        watches = unit.watch, unit.report.watch, unit.prefixes.watch
        self._watches[unit.name] = [tasks.create_task(watch()) for watch in watches]

    def _unwatch(self, name: str) -> None:
        for watch in self._watches.pop(name, ()):
            watch.cancel()

    def _admit(self, newcomer: Unit, cards: Sequence[ModelCard]) -> Sequence[ModelCard]:
        """Returns the cards of what the unit is to serve: an adapter that it has only proven yet is not among
        them. Raises ConfigError if the unit would answer for a model with another's tokens. One other replica
        speaks for all, because they were admitted in the same way."""
        if self._link is not None and (spec := self._link.mirror.spec.units.get(newcomer.name)) is not None:
            served = spec.engine.served
            cards = [card for card in cards if card.parent is None or card.name in served]
        for card in cards:
            others = (unit for unit in self._units.values() if unit is not newcomer)
            other = next((unit for unit in others if card.name in unit.replicas), None)
            if other is None:
                continue
            known = other.replicas[card.name].card
            for field in _SPOKEN:
                if getattr(card, field) != getattr(known, field):
                    raise ConfigError(
                        f"{card.name} differs in {field} between {other.name} and {newcomer.name}; "
                        "replicas of one model, or models of two names, are right"
                    )
        return cards

    def _lost(self, unit: Unit) -> None:
        unit.prefixes.forget()
        self._said.pop(unit, None)
        unit.report.forget()
