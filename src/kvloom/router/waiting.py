"""Requests that nobody can answer yet, but somebody will soon."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable


class WaitingRoom:
    """seconds: for which a request waits at most. waiting: how many wait now, by model."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.waiting: Counter[str] = Counter()
        self._bells: dict[str, asyncio.Event] = {}  # by request

    def tell(self) -> None:
        """Something is no longer as it was: all who wait look whether that ends their wait."""
        for bell in self._bells.values():
            bell.set()

    def tell_one(self, request: str) -> None:
        """The same for this one, if it waits."""
        if request in self._bells:
            self._bells[request].set()

    async def wait_while(self, needed: Callable[[], bool], model: str, request: str) -> None:
        """Raises TimeoutError where it is needed for longer than that."""
        if not needed():
            return
        self.waiting[model] += 1
        bell = self._bells[request] = asyncio.Event()
        try:
            async with asyncio.timeout(self.seconds):
                while needed():
                    await bell.wait()
                    bell.clear()
        finally:
            del self._bells[request]
            self.waiting[model] -= 1
