"""Processes that a gateway has asked its supervisor for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvloom.core.errors import Unavailable
from kvloom.core.request import ModelCard
from kvloom.core.spec import EngineSpec
from kvloom.serve.orders import Asked, Forget, Restart, Restarted, Run, Stop, Stopped
from kvloom.serve.shelf import Shelf


class Restarts:
    """By component, one at a time each. Satisfies `Processes`. ask: hands the supervisor what it is asked."""

    def __init__(self, ask: Callable[[Asked], None], shelf: Shelf) -> None:
        self._ask = ask
        self._shelf = shelf
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def __call__(self, component: str) -> None:
        """Until its new process answers. Raises Unavailable where that dies instead."""
        await self._done(component, Restart(component))

    async def start(self, spec: EngineSpec) -> None:
        """Until the unit answers. Raises Unavailable where it dies instead."""
        await self._done(spec.unit, Run(spec))

    async def stop(self, unit: str, cards: Sequence[ModelCard]) -> None:
        """Until its process has ended."""
        self._shelf.keep(unit, cards)
        await self._done(unit, Stop(unit))

    def forget(self, unit: str) -> None:
        self._ask(Forget(unit))

    async def _done(self, component: str, asked: Asked) -> None:
        waiting = self._waiting[component] = asyncio.get_running_loop().create_future()
        try:
            self._ask(asked)
            await waiting
        finally:
            del self._waiting[component]

    def heed(self, news: Restarted | Stopped) -> None:
        component = news.unit if isinstance(news, Stopped) else news.component
        waiting = self._waiting.get(component)
        if waiting is None or waiting.done():
            return
        if isinstance(news, Restarted) and news.problem is not None:
            waiting.set_exception(Unavailable(news.problem))
        else:
            waiting.set_result(None)
