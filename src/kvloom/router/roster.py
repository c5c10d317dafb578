"""Units that get a process and lose it while the router serves, so that no request is lost on the way."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Protocol, Self

from kvloom.router.router import Router
from kvloom.router.unit import Unit
from kvloom.types.client import EngineClient
from kvloom.types.errors import BadRequest, ConfigError, Conflict, KvloomError
from kvloom.types.request import ModelCard
from kvloom.types.service import Group, GroupSpec, Placement, Steps
from kvloom.types.spec import EngineSpec

_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")  # it becomes part of a path
_TAKEN: Final = ("gateway", "scheduler")  # by the fleet's other components

_log = logging.getLogger(__name__)


class Processes(Protocol):
    """All but `forget` raise KvloomError."""

    async def start(self, spec: EngineSpec) -> None:
        """Give a unit a process, until that answers."""

    async def stop(self, unit: str, cards: Sequence[ModelCard]) -> None:
        """End it, until it has ended. cards: what the unit serves, for those who learn of it later."""

    def forget(self, unit: str) -> None:
        """A unit that has no process is not to get one any more."""


class Roster:
    """An async context manager: orders that are under way are given up with it. specs: of all units that the
    router knows. groups: those that come and go by themselves, by name. processes: who gives units a process.
    connect: the client of a unit that was not there. changed: called with the units that are to go, and the
    seconds that they are given, whenever others are. memory, cores: what the fleet's machine has for it."""

    def __init__(
        self,
        router: Router,
        *,
        specs: Iterable[EngineSpec],
        groups: Mapping[str, GroupSpec],
        processes: Processes,
        connect: Callable[[str], Awaitable[EngineClient]],
        changed: Callable[[Mapping[str, float | None]], None],
        memory: int,
        cores: int,
    ) -> None:
        self._router = router
        self._specs = {spec.unit: spec for spec in specs}
        self._groups = groups
        self._processes = processes
        self._connect = connect
        self._changed = changed
        self._memory = memory
        self._cores = cores
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._stops: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, float | None] = {}  # seconds that these are given

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        orders = [*self._starts.values(), *self._stops.values()]
        for order in orders:
            order.cancel()
        await asyncio.gather(*orders, return_exceptions=True)

    @property
    def groups(self) -> dict[str, Group]:
        """As they stand now."""
        return {name: self._group(spec) for name, spec in self._groups.items()}

    def _group(self, spec: GroupSpec) -> Group:
        units = [self._router.units[unit] for unit in spec.units]
        leaving = [unit for unit in units if unit.presence == "leaving"]
        away = [unit for unit in units if unit.presence == "away" and unit.may_start]
        return Group(
            units=frozenset(unit.name for unit in units),
            scale=spec.scale,
            starting=sum(unit.service in ("starting", "restarting") for unit in units),
            away=tuple(unit.name for unit in (*leaving, *away)),
            models=frozenset(model for unit in units for model in unit.replicas),
            idle=min(unit.idle for unit in units),
        )

    def models(self, unit: str) -> tuple[str, ...]:
        """That it serves, or is to; none of a unit that is not known here."""
        spec = self._specs.get(unit)
        return tuple(model.name for model in spec.models) if spec else ()

    @property
    def placement(self) -> Placement:
        units = self._router.units
        away = [name for name in self._specs if units[name].presence == "away"]
        return Placement(
            units=tuple(spec for name, spec in self._specs.items() if name not in away),
            away=tuple(self._specs[name] for name in away),
            scaled=self._scaled,
            memory=self._memory,
            cores=self._cores,
        )

    @property
    def _scaled(self) -> tuple[str, ...]:
        return tuple(name for spec in self._groups.values() for name in spec.units)

    async def add(self, spec: EngineSpec) -> None:
        """A unit that was not there, until it takes requests. Raises what its process died of, and Conflict
        where it serves something else under a name that another unit serves: then it is not there."""
        name, units = spec.unit, self._router.units
        if name in _TAKEN or not _NAME.fullmatch(name):
            raise BadRequest(
                f"unit: {name[:80]!r} is no name for a unit; another one of letters, digits and .-_ is right",
                param="unit",
            )
        if name in units:
            raise Conflict(f"there is a unit {name} already; another name is right")
        unit = units.add(name, await self._connect(name))
        self._specs[name] = spec
        try:
            await self.start(name)
            if isinstance(unit.problem, ConfigError):
                problem = unit.problem.message
                await self.stop(name)
                raise Conflict(problem)
        except KvloomError:
            self.remove(name)
            raise

    def remove(self, name: str) -> None:
        """Raises Conflict where the unit has a process, or comes and goes by itself."""
        if name in self._scaled:
            raise Conflict(f"{name} comes and goes by itself; the config's `replicas` say so")
        self._router.units.remove(name)
        del self._specs[name]
        self._processes.forget(name)

    def begin(self, steps: Steps) -> None:
        """Does not wait. Units that nobody knows, and those for which something else is under way, are passed
        over."""
        units = self._router.units
        for unit in (units[name] for name in steps.start if name in units):
            if unit.presence != "here":
                self._starting(unit)
        self.leave(dict.fromkeys(steps.stop))

    def leave(self, units: Mapping[str, float | None]) -> None:
        """Stop these, as `begin` does, with the seconds that each is given. Does not wait."""
        for unit in (self._router.units[name] for name in units if name in self._router.units):
            if unit.presence == "here" and not unit.restarting:
                self._stopping(unit, units[unit.name])

    def heed(self, away: Collection[str]) -> None:
        """These units have no process, and all others have. Those for which something is under way here are
        left to that."""
        for unit in self._router.units.values():
            if unit.name in self._starts or unit.name in self._stops:
                continue
            if unit.presence == "here" and unit.name in away:
                unit.leave()
                unit.gone()
            elif unit.presence == "away" and unit.name not in away:
                self._starting(unit)

    async def start(self, name: str) -> None:
        """Until the unit takes requests; goes on where its caller does not wait. One that is to go stays.
        Raises what its process died of: then it is away as before."""
        unit = self._router.units[name]
        if unit.presence != "here" or name in self._stops:
            await _done(self._starting(unit))

    async def stop(self, name: str, seconds: float | None = None) -> None:
        """Give it no new request, and end its process once nothing runs there, or `seconds` are over: what
        still runs then goes on elsewhere, if it can. Requests wait for the unit where nobody else serves
        their model. Goes on where its caller does not wait. Raises Conflict where it is being started or
        restarted, or is started again meanwhile."""
        unit = self._router.units[name]
        if unit.presence == "away":
            return
        if name in self._starts or unit.restarting:
            raise Conflict(f"{name} is being started; stop it once it serves")
        await _done(self._stopping(unit, seconds))

    def _starting(self, unit: Unit) -> asyncio.Task[None]:
        if unit.name not in self._starts:
            self._starts[unit.name] = _logged(unit, self._start(unit))
        return self._starts[unit.name]

    def _stopping(self, unit: Unit, seconds: float | None) -> asyncio.Task[None]:
        if unit.name not in self._stops:
            self._leaving[unit.name] = seconds
            self._stops[unit.name] = _logged(unit, self._stop(unit, seconds))
        return self._stops[unit.name]

    async def _start(self, unit: Unit) -> None:
        try:
            stopping = self._stops.get(unit.name)
            if stopping is not None:
                if unit.presence == "leaving":
                    stopping.cancel()
                await asyncio.wait([stopping])
            if unit.presence == "away":
                unit.come()
                try:
                    await self._processes.start(self._specs[unit.name])
                except KvloomError as error:
                    unit.failed(error)
                    raise
            await unit.arrive()
        finally:
            del self._starts[unit.name]

    async def _stop(self, unit: Unit, seconds: float | None) -> None:
        try:
            unit.leave()
            self._changed(dict(self._leaving))
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await unit.emptied()
            unit.presence = "ending"
            await self._processes.stop(unit.name, [one.card for one in unit.replicas.values()])
            unit.gone()
        except Exception:
            unit.presence = "leaving"  # its process lives: it counts, and can be stopped again
            raise
        finally:
            del self._stops[unit.name], self._leaving[unit.name]
            self._changed(dict(self._leaving))


def _logged(unit: Unit, order: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Nobody may wait for it, and what it fails of is to be seen."""
    task = asyncio.create_task(order)

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            _log.warning("%s: %s", unit.name, error)

    task.add_done_callback(ended)
    return task


async def _done(order: asyncio.Task[None]) -> None:
    """Raises Conflict where it was called back."""
    await asyncio.wait([order])
    if order.cancelled():
        raise Conflict("called back: the unit was started again meanwhile, or the gateway ends")
    order.result()
