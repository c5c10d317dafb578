"""Requests that nobody can answer yet, but somebody will soon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class WaitingRoom:
    """seconds: for which a request waits at most."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._news = asyncio.Event()

    def tell(self) -> None:
        """Something is no longer as it was: all who wait look whether that ends their wait."""
        self._news.set()
        self._news = asyncio.Event()

    async def wait_while(self, needed: Callable[[], bool]) -> None:
        """Raises TimeoutError where it is needed for longer than that."""
        if not needed():
            return
        async with asyncio.timeout(self.seconds):
            while needed():
                await self._news.wait()
