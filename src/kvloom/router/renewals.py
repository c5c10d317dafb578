"""Keeps alive what one request has reserved or pinned at replicas."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from kvloom.router.replica import Replica
from kvloom.types.clock import Clock
from kvloom.types.errors import KvloomError

RENEWALS: Final = 3  # in the time of one lease


class Renewals:
    """tasks: where they run."""

    def __init__(self, clock: Clock, tasks: asyncio.TaskGroup) -> None:
        self._clock = clock
        self._tasks = tasks
        self._kept: dict[Replica, asyncio.Task[None]] = {}

    async def renew(self, replica: Replica, name: str, lease: float) -> None:
        """Until it is cancelled. name: the request's id there. Raises KvloomError where nothing is left."""
        while True:
            await self._clock.sleep(lease / RENEWALS)
            async with replica.reached():
                await replica.client.renew(name)

    def keep(self, replica: Replica, name: str, lease: float) -> None:
        """Until `stop`. What is lost meanwhile spares less, and that is all."""
        if replica not in self._kept:
            self._kept[replica] = self._tasks.create_task(self._keep(replica, name, lease))

    async def _keep(self, replica: Replica, name: str, lease: float) -> None:
        with suppress(KvloomError):
            await self.renew(replica, name, lease)

    def stop(self) -> None:
        while self._kept:
            _, renewing = self._kept.popitem()
            renewing.cancel()
