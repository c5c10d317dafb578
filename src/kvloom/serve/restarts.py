"""Restarts that a gateway has asked its supervisor for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from kvloom.core.errors import Unavailable
from kvloom.serve.orders import Restart, Restarted


class Restarts:
    """By unit, one at a time each; made on the event loop that waits for them. ask: hands the supervisor what
    it is asked."""

    def __init__(self, ask: Callable[[Restart], None]) -> None:
        self._ask = ask
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def __call__(self, unit: str) -> None:
        """Until the unit's new process answers. Raises Unavailable where it dies instead."""
        waiting = self._waiting[unit] = self._loop.create_future()
        try:
            self._ask(Restart(unit))
            await waiting
        finally:
            del self._waiting[unit]

    def heed(self, order: Restarted) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._ended, order)

    def _ended(self, order: Restarted) -> None:
        waiting = self._waiting.get(order.unit)
        if waiting is None or waiting.done():
            return
        if order.problem is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(Unavailable(order.problem))
