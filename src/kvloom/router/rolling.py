"""Restarts all of a fleet, one component after the other, while it serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Final, Self

from kvloom.router.drains import Drains
from kvloom.types.clock import Clock
from kvloom.types.errors import Conflict, KvloomError, Unavailable
from kvloom.types.service import RestartStep

_TAKEN_OUT: Final = ("draining", "drained")  # by hand, and so they stay


class Rolling:
    """An async context manager: a restart that is under way is given up with it.

    restart: puts a new process in the place of a component's and returns once that answers; raises
    KvloomError where it does not. beside: the components that are no units, in their order, this gateway's
    own the last: with its end the restart is over, and whoever listens hears so from here.
    """

    def __init__(
        self,
        drains: Drains,
        clock: Clock,
        *,
        restart: Callable[[str], Awaitable[None]],
        beside: Sequence[str],
    ) -> None:
        self._drains = drains
        self._clock = clock
        self._new_process = restart
        self._beside = beside
        self._steps: list[RestartStep] = []
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._leaving = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def begin(self, seconds: float | None = None) -> None:
        """seconds: for which what runs at a unit is waited for, as of a drain. Goes on whoever listens.
        Raises Conflict while one is under way."""
        if self._task is not None and not self._task.done():
            at = self._steps[-1].component if self._steps else "the first component"
            raise Conflict(f"a rolling restart is under way, at {at}; ask again once it is over")
        self._steps = []
        self._task = asyncio.create_task(self._run(seconds))

    async def steps(self) -> AsyncGenerator[RestartStep, None]:
        """From the first on, until it is over."""
        task, steps, told = self._task, self._steps, 0
        while True:
            news = self._news
            while told < len(steps):
                yield steps[told]
                told += 1
            if task is None or task.done():
                return
            await news.wait()

    def refuse_while_leaving(self) -> None:
        """Raises Conflict where what is ordered now might not reach this gateway's successor."""
        if self._leaving:
            raise Conflict("another gateway is about to take this one's place; ask again then", retry_after=1)

    async def _run(self, seconds: float | None) -> None:
        try:
            for name in [state.name for state in self._drains.states]:
                if self._drains.stays(name):
                    await self._step(name, lambda name: self._unit(name, seconds))
            for component in self._beside:
                await self._step(component, self._component)
        except KvloomError:
            pass  # told, and the others had better go on as they are
        finally:
            self._tell()

    async def _step(self, component: str, restart: Callable[[str], Awaitable[None]]) -> None:
        began = self._clock.now()
        self._tell(RestartStep(component=component, state="restarting"))
        try:
            await restart(component)
        except KvloomError as error:
            self._tell(RestartStep(component=component, state="failed", problem=error.message))
            raise
        seconds = self._clock.now() - began
        self._tell(RestartStep(component=component, state="restarted", seconds=round(seconds, 3)))

    async def _unit(self, name: str, seconds: float | None) -> None:
        """One that somebody has taken out of service stays out."""
        if self._drains.state(name).state in _TAKEN_OUT:
            await self._drains.drain(name, seconds)
            await self._new_process(name)
            return
        after = await self._drains.restart(name, seconds)
        if after.state == "down":
            why = f": {after.problem}" if after.problem else ""
            raise Unavailable(f"{name} is down with its new process{why}; the others stay as they are")

    async def _component(self, name: str) -> None:
        if name == self._beside[-1]:
            for state in self._drains.states:
                if state.state == "restarting":  # by somebody else's order, which this gateway is to finish
                    await self._drains.restart(state.name)
            self._leaving = True
        try:
            await self._new_process(name)
        except KvloomError:
            self._leaving = False
            raise

    def _tell(self, *steps: RestartStep) -> None:
        self._steps += steps
        self._news.set()
        self._news = asyncio.Event()
