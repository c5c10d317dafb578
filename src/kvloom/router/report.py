"""A unit's last load report, kept fresh while programs decide by it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import reduce
from typing import Final

from kvloom.cluster.freeness import Arrival
from kvloom.types.clock import Clock
from kvloom.types.load import UnitLoad

PERIOD: Final = 0.5  # seconds between an answer and the next time the unit is asked
LINGER: Final = 10.0  # seconds for which it is still asked when nobody wanted to know any more


class Report:
    """ask: gives the unit's load, None where it does not answer. What this router has sent there since it was
    asked counts as if it ran already, though the unit may have told of it: for one period at most. Other
    routers' requests, and those that end, are seen a period late."""

    def __init__(self, ask: Callable[[], Awaitable[UnitLoad | None]], clock: Clock) -> None:
        self._ask = ask
        self._clock = clock
        self._load: UnitLoad | None = None
        self._reported: UnitLoad | None = None
        self._sent: list[Arrival] = []  # since it was asked last
        self._wanted = asyncio.Event()
        self._until = 0.0

    def expected(self) -> UnitLoad | None:
        """The unit's load by now; None where it is not known. It is asked from now on."""
        self._want()
        return self._load

    def reported(self) -> UnitLoad | None:
        """The same as it was told, without what was sent since."""
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
        """The unit is gone, or another."""
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
