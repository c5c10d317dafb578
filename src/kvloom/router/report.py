"""A unit's last load report, kept fresh while programs decide by it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import reduce
from typing import Final

from kvloom.core.clock import Clock
from kvloom.core.load import UnitLoad
from kvloom.fleet.dispatch import after

PERIOD: Final = 0.5  # seconds between an answer and the next time the unit is asked
LINGER: Final = 10.0  # seconds for which it is still asked when nobody wanted to know any more


@dataclass(frozen=True, slots=True)
class _Sent:
    model: str
    prompt: int
    choices: int

    def added(self, load: UnitLoad) -> UnitLoad:
        own = load.models.get(self.model)
        if own is None:
            return load
        return after(load, self.model, self.choices, own.blocks(self.prompt))


class Report:
    """ask: gives the unit's load, None where it does not answer. What this router has sent there since it was
    asked counts as if it ran already, though the unit may have told of it: for one period at most. Other
    routers' requests, and those that end, are seen a period late."""

    def __init__(self, ask: Callable[[], Awaitable[UnitLoad | None]], clock: Clock) -> None:
        self._ask = ask
        self._clock = clock
        self._load: UnitLoad | None = None
        self._sent: list[_Sent] = []  # since it was asked last
        self._wanted = asyncio.Event()
        self._until = 0.0

    def expected(self) -> UnitLoad | None:
        """The unit's load by now; None where it is not known. It is asked from now on."""
        self._until = self._clock.now() + LINGER
        self._wanted.set()
        return self._load

    def sent(self, model: str, prompt: int, choices: int) -> None:
        """A prompt of so many tokens, to be answered so many times."""
        if self._wanted.is_set():
            self._sent.append(_Sent(model, prompt, choices))
            if self._load is not None:
                self._load = self._sent[-1].added(self._load)

    def forget(self) -> None:
        """The unit is gone, or another."""
        self._load = None
        self._sent.clear()

    async def watch(self) -> None:
        while True:
            await self._wanted.wait()
            while self._clock.now() < self._until:
                self._sent.clear()
                load = await self._ask()
                self._load = load and reduce(lambda had, one: one.added(had), self._sent, load)
                await self._clock.sleep(PERIOD)
            self._wanted.clear()
            self.forget()
