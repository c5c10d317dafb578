"""Restarts that a gateway has asked its supervisor for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvloom.core.errors import Unavailable
from kvloom.serve.orders import Restart, Restarted


class Restarts:
    """By component, one at a time each. ask: hands the supervisor what it is asked."""

    def __init__(self, ask: Callable[[Restart], None]) -> None:
        self._ask = ask
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def __call__(self, component: str) -> None:
        """Until its new process answers. Raises Unavailable where that dies instead."""
        waiting = self._waiting[component] = asyncio.get_running_loop().create_future()
        try:
            self._ask(Restart(component))
            await waiting
        finally:
            del self._waiting[component]

    def heed(self, order: Restarted) -> None:
        waiting = self._waiting.get(order.component)
        if waiting is None or waiting.done():
            return
        if order.problem is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(Unavailable(order.problem))
