"""A fleet scheduler in virtual time, beside a router, where nothing goes wrong between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvloom.core.clock import Clock
from kvloom.fleet.scheduler import FleetScheduler
from kvloom.fleet.thresholds import Thresholds
from kvloom.router.rescheduling import Rescheduler
from kvloom.router.router import Router


@dataclass(frozen=True, slots=True)
class Rescheduling:
    """What a fleet scheduler is started with. period: seconds."""

    period: float = 0.5
    thresholds: Thresholds = field(default_factory=Thresholds)


@asynccontextmanager
async def rescheduled(router: Router, clock: Clock, given: Rescheduling) -> AsyncIterator[Rescheduler]:
    """Requests of `router` move while it is open."""
    async with Rescheduler(router, clock) as rescheduler, asyncio.TaskGroup() as group:
        scheduler = FleetScheduler(rescheduler, clock, period=given.period, thresholds=given.thresholds)
        running = group.create_task(scheduler.run())
        try:
            yield rescheduler
        finally:
            running.cancel()
