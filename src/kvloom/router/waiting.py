"""Requests that nobody can answer yet, but somebody will soon."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import reduce
from typing import Final

from kvloom.engine.freeness import Arrival
from kvloom.types.clock import Clock
from kvloom.types.load import UnitLoad


class WaitingRoom:
    """Requests wait here for a unit that is to come."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """The longest time that a request waits."""
        self._bells: dict[str, dict[str, asyncio.Event]] = {}  # by model and by request

    @property
    def waiting(self) -> dict[str, int]:
        """Returns the number of requests that wait now, by model."""
        return {model: len(bells) for model, bells in self._bells.items()}

    def tell(self, models: Iterable[str]) -> None:
        """Wakes the requests for these models, because something has changed that may end their wait."""
        for model in models:
            for bell in self._bells.get(model, {}).values():
                bell.set()

    def tell_one(self, model: str, request: str) -> None:
        """Wakes this request, if it waits."""
        if bell := self._bells.get(model, {}).get(request):
            bell.set()

    async def wait_while(self, needed: Callable[[], bool], model: str, request: str) -> None:
        """Waits as long as `needed` holds. Raises TimeoutError if that is longer than the room's seconds."""
        if not needed():
            return
        bells = self._bells.setdefault(model, {})
        bell = bells[request] = asyncio.Event()
        try:
            async with asyncio.timeout(self.seconds):
                while needed():
                    await bell.wait()
                    bell.clear()
        finally:
            del bells[request]
            if not bells:
                del self._bells[model]


PERIOD: Final = 0.5  # seconds between an answer and the next time the unit is asked
LINGER: Final = 10.0  # seconds for which it is still asked when nobody wanted to know any more


class LoadReport:
    """Keeps a unit's load fresh. The requests that this router has sent there since the unit was asked count
    as running already, though the unit may have told of them: for one period at most. Other routers'
    requests, and those that end, are seen a period late."""

    def __init__(self, ask: Callable[[], Awaitable[UnitLoad | None]], clock: Clock) -> None:
        """`ask` returns the unit's load, and None if the unit does not answer."""
        self._ask = ask
        self._clock = clock
        self._load: UnitLoad | None = None
        self._reported: UnitLoad | None = None
        self._sent: list[Arrival] = []  # since it was asked last
        self._wanted = asyncio.Event()
        self._until = 0.0

    def expected(self) -> UnitLoad | None:
        """Returns the unit's load by now, and None if it is not known. The unit is asked from now on."""
        self._want()
        return self._load

    def reported(self) -> UnitLoad | None:
        """Returns the load as the unit told it, without what was sent since."""
        self._want()
        return self._reported

    def _want(self) -> None:
        self._until = self._clock.now() + LINGER
        self._wanted.set()

    def sent(self, one: Arrival) -> None:
        if self._wanted.is_set():
            self._sent.append(one)
            if self._load is not None:
                self._load = one.placed(self._load)

    def forget(self) -> None:
        """Drops the load, because the unit is gone or another one."""
        self._load = self._reported = None
        self._sent.clear()

    async def watch(self) -> None:
        while True:
            await self._wanted.wait()
            while self._clock.now() < self._until:
                self._sent.clear()
                load = self._reported = await self._ask()
                self._load = load and reduce(lambda had, one: one.placed(had), self._sent, load)
                await self._clock.sleep(PERIOD)
            self._wanted.clear()
            self.forget()
