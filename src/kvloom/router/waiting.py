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
        self._news = asyncio.Event()

    def tell(self) -> None:
        """Something is no longer as it was: all who wait look whether that ends their wait."""
        self._news.set()
        self._news = asyncio.Event()

    async def wait_while(self, needed: Callable[[], bool], model: str) -> None:
        """Raises TimeoutError where it is needed for longer than that."""
        if not needed():
            return
        self.waiting[model] += 1
        try:
            async with asyncio.timeout(self.seconds):
                while needed():
                    await self._news.wait()
        finally:
            self.waiting[model] -= 1
