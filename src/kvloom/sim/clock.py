"""The virtual world's clock."""

from __future__ import annotations

import asyncio


class LoopClock:
    """Satisfies `Clock`: the time of an event loop, virtual or not."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
