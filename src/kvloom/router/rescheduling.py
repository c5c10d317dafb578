"""Lets requests migrate along the pairs that the fleet scheduler makes (Llumnix, section 4.3)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self

from msgspec.structs import replace

from kvloom.cluster.orders import FleetOrders
from kvloom.journal.records import Moved, Recorder, Stayed, nobody, short
from kvloom.router.router import Router
from kvloom.router.unit import Unit
from kvloom.types.clock import Clock
from kvloom.types.errors import KvloomError
from kvloom.types.load import UnitLoad
from kvloom.types.service import IN_SERVICE, FleetState, GroupSpec, Pair, Pairs, Steps, UnitGroup
from kvloom.types.verbs import Offer

MOST_REFUSALS: Final = 3  # in a row, after which a pair is left in peace until pairs are told again

_log = logging.getLogger(__name__)


class Rescheduler:
    """The fleet as its scheduler controls it. A pair moves one request at a time, for as long as it stands
    and its source has one to offer. It is an async context manager: moves that are under way are given up
    with it."""

    def __init__(
        self, router: Router, clock: Clock, orders: FleetOrders | None = None, record: Recorder = nobody
    ) -> None:
        """`orders` starts and stops units. record: takes moves to the journal."""
        self.moved = 0
        """Requests that went over, so far."""
        self.stayed = 0
        """Requests that could not, so far."""
        self._router = router
        self._clock = clock
        self._orders = orders
        self._record = record
        self._pairs: frozenset[Pair] = frozenset()
        self._until = 0.0
        self._floor = 0.0
        self._freeness: Mapping[str, float | None] = {}
        self._passed: dict[str, list[str]] = {}  # by source, who could not go: until nobody else is there
        self._moving: dict[Pair, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pairs = frozenset()
        for moving in self._moving.values():
            moving.cancel()
        await self._tasks.__aexit__(None, None, None)

    @property
    def moves(self) -> dict[str, int]:
        """Returns the number of moves so far, by their outcome."""
        return {"moved": self.moved, "stayed": self.stayed}

    async def state(self) -> FleetState:
        services = self._router.services
        loads = await self._router.loads()
        return FleetState(
            loads={
                name: load if services[name] in IN_SERVICE else replace(load, draining=True)
                for name, load in loads.items()
            },
            waiting=self._router.waiting,
            groups=self.groups,
        )

    @property
    def groups(self) -> dict[str, UnitGroup]:
        """Units that come and go, as they stand now."""
        groups = self._orders.mirror.spec.groups if self._orders is not None else {}
        return {name: self._group(spec) for name, spec in groups.items()}

    def _group(self, spec: GroupSpec) -> UnitGroup:
        known = self._router.units
        units = [known[name] for name in spec.units if name in known]
        leaving = [unit for unit in units if unit.outlook == "leaving"]
        away = [unit for unit in units if unit.outlook in ("away", "failed") and unit.may_start]
        return UnitGroup(
            units=frozenset(unit.name for unit in units),
            scale=spec.scale,
            starting=sum(unit.outlook in ("starting", "restarting") for unit in units),
            away=tuple(unit.name for unit in (*leaving, *away)),
            models=frozenset(model for unit in units for model in unit.replicas),
            idle=min((unit.idle for unit in units), default=0.0),
        )

    async def scale(self, steps: Steps) -> None:
        if self._orders is not None:
            await self._orders.scale(steps)

    async def pair(self, pairs: Pairs) -> None:
        """Takes over the pairs in place of those before. Pairs of units that nobody knows are passed over."""
        units = self._router.units
        self._pairs = frozenset(
            one for one in pairs.pairs if one.source in units and one.destination in units
        )
        self._until = self._clock.now() + pairs.seconds
        self._floor = pairs.floor
        self._freeness = pairs.freeness
        for gone in self._passed.keys() - {one.source for one in self._pairs}:
            del self._passed[gone]
        for one in sorted(self._pairs - self._moving.keys()):
            self._moving[one] = self._tasks.create_task(self._work_off(one))

    async def _work_off(self, pair: Pair) -> None:
        passed = self._passed.setdefault(pair.source, [])
        most = len(passed) + MOST_REFUSALS
        try:
            while self._stands(pair) and len(passed) < most:
                name = await self._offered(pair, [*passed, *self._router.moving])
                if name is None:
                    passed.clear()
                    return
                request = self._router.asked_as(name)  # None: of a gateway whose place this one has taken
                if request is not None and await self._moves(request, pair):
                    most = len(passed) + MOST_REFUSALS
                else:
                    passed.append(name)
        except KvloomError as error:
            _log.info("%s and %s: %s", pair.source, pair.destination, error.message)
        finally:
            del self._moving[pair]

    def _stands(self, pair: Pair) -> bool:
        return pair in self._pairs and self._clock.now() < self._until

    async def _offered(self, pair: Pair, besides: list[str]) -> str | None:
        """Returns a request's id at the source; None if it offers none, or if a unit is there no more."""
        units = self._router.units
        source, destination = units.get(pair.source), units.get(pair.destination)
        if source is None or destination is None or (load := await destination.load()) is None:
            return None
        floor = self._floor if source.service in IN_SERVICE else 0.0  # one that drains has to be empty
        body = Offer(destination=_alike(load, source, destination), floor=floor, besides=besides)
        return (await source.client.offer(body)).request

    async def _moves(self, request: str, pair: Pair) -> bool:
        session, why = self._router.sessions.get(request), self._why(pair)
        told = {
            "request": request,
            "model": session.model if session else "",
            "source": pair.source,
            "destination": pair.destination,
        }
        try:
            await self._router.move(request, pair.destination)
        except KvloomError as error:
            self.stayed += 1
            _log.info("request %s stays at %s: %s", request, pair.source, error.message)
            self._record(Stayed(**told, reason=short(f"{why}; {error.message}")))
            return False
        self.moved += 1
        self._record(Moved(**told, reason=why))
        return True

    def _why(self, pair: Pair) -> str:
        """Returns why requests move along a pair."""
        if not self._freeness.keys() >= {pair.source, pair.destination}:
            return "ordered"
        here, there = self._freeness[pair.source], self._freeness[pair.destination]
        source = "it drains" if here is None else f"freeness {here:.4g}"
        return f"{source} against " + ("an idle unit" if there is None else f"{there:.4g}")


def _alike(load: UnitLoad, source: Unit, destination: Unit) -> UnitLoad:
    """Returns the destination's load without the models of which the units keep K and V in unlike forms."""
    here, there = source.replicas, destination.replicas
    alike = {
        name: model
        for name, model in load.models.items()
        if name in here and name in there and here[name].card.form == there[name].card.form
    }
    return replace(load, models=alike)
