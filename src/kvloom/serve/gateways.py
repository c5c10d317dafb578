"""A fleet's gateway, the one that is to take its place, and those that have left it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvloom.serve.orders import News, Restarted
from kvloom.serve.supervised import Role, Supervised

START_SECONDS: Final = 60.0  # for an heir to answer
MARGIN: Final = 5.0  # seconds beyond its time, after which one that has left is killed


class Gateways:
    """All of them accept at one listening socket, so that nobody who connects is turned away while one takes
    another's place. seconds: for which one that has left may bring its requests to their end."""

    def __init__(self, role: Role, supervise: Callable[[Role], Supervised], *, seconds: float) -> None:
        self.current = supervise(role)
        self.heir: Supervised | None = None
        self._role = role
        self._supervise = supervise
        self._seconds = seconds
        self._left: list[Supervised] = []

    @property
    def every(self) -> list[Supervised]:
        return [self.current, *([self.heir] if self.heir else []), *self._left]

    def has_left(self, process: Supervised) -> bool:
        return process in self._left

    async def alone(self) -> None:
        """Until all that have left have ended: they have requests that the present one cannot see."""
        for gateway in tuple(self._left):
            await gateway.ended()

    async def tell(self, news: News) -> None:
        """Those too that have left: what they were ordered before may wait for it."""
        for gateway in (self.current, *self._left):
            await gateway.order(news)

    async def replace(self) -> None:
        """Start an heir, and keep it alive; `hand_over` is called once it answers, `lost_heir` where it
        dies."""
        if self.heir is not None:
            await self.current.order(Restarted(self._role.name, "the gateway is being replaced already"))
            return
        heir = self.heir = self._supervise(self._role)
        await heir.begin()
        running = asyncio.create_task(heir.run())
        await asyncio.wait({running}, timeout=START_SECONDS)
        if self.heir is heir and not running.done():
            heir.kill()
            await self.lost_heir(f"gave no answer in {START_SECONDS:g} s")
        await running

    async def lost_heir(self, how: str) -> None:
        """It never answered; the present one goes on."""
        self.heir = None
        problem = f"the new gateway {how} as it started; the present one serves on"
        await self.current.order(Restarted(self._role.name, problem))

    def hand_over(self) -> Supervised:
        """The heir is the gateway from now on. Returns the one that is to be seen off."""
        assert self.heir is not None
        old, self.current, self.heir = self.current, self.heir, None
        self._left.append(old)
        return old

    async def see_off(self, old: Supervised) -> None:
        """Until it has ended."""
        await old.order(Restarted(self._role.name))
        await old.retire()
        try:
            async with asyncio.timeout(self._seconds + MARGIN):
                await old.ended()
        except TimeoutError:
            old.kill()
            await old.ended()
        self._left.remove(old)
