"""Units taken out of service and back by order, so that no request is lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from kvloom.router.router import Router
from kvloom.types.errors import Conflict, KvloomError, Unavailable
from kvloom.types.service import UnitState


class Drains:
    """An async context manager: orders that are under way are given up with it, or by `give_up` before.

    seconds: for which what runs at a unit is waited for, where an order does not say. restart: puts a new
    process in the place of the unit's and returns once that answers; raises KvloomError where it does not.
    changed: called with the units that are drained whenever others are; restarts do not count.
    """

    def __init__(
        self,
        router: Router,
        *,
        seconds: float,
        restart: Callable[[str], Awaitable[None]],
        changed: Callable[[frozenset[str]], None],
    ) -> None:
        self._router = router
        self._seconds = seconds
        self._new_process = restart
        self._changed = changed
        self._restarts: dict[str, asyncio.Task[None]] = {}
        self._over = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_up()
        restarts = list(self._restarts.values())
        for restart in restarts:
            restart.cancel()
        await asyncio.gather(*restarts, return_exceptions=True)

    def give_up(self) -> None:
        """The gateway ends: who waits for an order learns that now."""
        self._over.set()

    @property
    def states(self) -> list[UnitState]:
        return [self.state(name) for name in self._router.units]

    def state(self, name: str) -> UnitState:
        unit = self._router.units[name]
        return UnitState(
            name=name,
            state=unit.service,
            calls=unit.calls,
            models=tuple(unit.replicas),
            problem=unit.problem.message if unit.problem else "",
        )

    def stays(self, name: str) -> bool:
        """It is there, has a process, and is not about to lose it."""
        unit = self._router.units.get(name)
        return unit is not None and unit.presence == "here"

    async def drain(self, name: str, seconds: float | None = None) -> UnitState:
        """Give the unit no new request, and wait for what runs there; what runs for longer goes on. Raises
        Conflict while it is being restarted, or has no process, and where it is admitted before the wait is
        over."""
        self._refuse_busy(name)
        self._router.withdraw(name)
        self._tell()
        await self._unless_over(asyncio.create_task(self._drained(name, seconds)))
        return self.state(name)

    async def admit(self, name: str) -> UnitState:
        """Undo `drain`; one that waits ends. A unit that does not answer takes requests as soon as it does.
        Raises Conflict while it is being restarted, after which it is admitted anyhow, and where it has no
        process."""
        self._refuse_busy(name)
        if self._router.units[name].withdrawn:
            await self._router.admit(name)
            self._tell()
        return self.state(name)

    async def restart(self, name: str, seconds: float | None = None) -> UnitState:
        """Drain the unit, put a new process in its place, and admit that. Goes on where its caller does not
        wait; a second call joins the first. Raises what the new process died of: then it is tried again, and
        takes requests once it answers. Raises Unavailable where the gateway ends, and Conflict where the unit
        has no process."""
        self._refuse_absent(name)
        if name not in self._restarts:
            self._restarts[name] = asyncio.create_task(self._restart(name, seconds))
            self._tell()
        await self._unless_over(asyncio.shield(self._restarts[name]))
        return self.state(name)

    async def _restart(self, name: str, seconds: float | None) -> None:
        problem: KvloomError | None = None
        try:
            with self._router.units[name].restarts():
                self._router.withdraw(name)
                await self._emptied(name, seconds)
                try:
                    await self._new_process(name)
                except KvloomError as error:
                    problem = error
                await self._router.admit(name)
        finally:
            del self._restarts[name]
        if problem is not None:
            raise problem

    async def _drained(self, name: str, seconds: float | None) -> None:
        if not await self._emptied(name, seconds):
            raise Conflict(
                f"{name} was admitted while its drain waited; drain it again to take it out of service"
            )

    async def _emptied(self, name: str, seconds: float | None) -> bool:
        """False where it is admitted before it is empty, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._seconds if seconds is None else seconds):
                return await self._router.units[name].emptied()
        return True

    async def _unless_over(self, order: asyncio.Future[None]) -> None:
        over: asyncio.Future[bool] = asyncio.create_task(self._over.wait())
        either: set[asyncio.Future[Any]] = {order, over}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not order.done():
                raise Unavailable("the gateway is ending, and gives up what it was ordered")
            order.result()
        finally:
            order.cancel()
            over.cancel()

    def _refuse_busy(self, name: str) -> None:
        self._refuse_absent(name)
        if name in self._restarts:
            raise Conflict(f"{name} is being restarted; it takes requests once it has")

    def _refuse_absent(self, name: str) -> None:
        if not self.stays(name):
            raise Conflict(f"{name} has no process, or is about to lose it; start it first")

    def _tell(self) -> None:
        units = self._router.units.values()
        drained = {unit.name for unit in units if unit.withdrawn and unit.presence == "here"}
        self._changed(frozenset(drained - self._restarts.keys()))
