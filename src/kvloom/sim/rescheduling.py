"""A fleet scheduler in virtual time, beside a router, where nothing goes wrong between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvloom.core.clock import Clock
from kvloom.core.load import UnitLoad
from kvloom.core.replicas import GroupSpec
from kvloom.core.spec import SchedulerSpec
from kvloom.fleet.scheduler import FleetScheduler
from kvloom.fleet.thresholds import Thresholds
from kvloom.router.rescheduling import Rescheduler
from kvloom.router.roster import Roster
from kvloom.router.router import Router


@dataclass(frozen=True, slots=True)
class Rescheduling:
    """What a fleet scheduler is started with. period: seconds. groups: units that come and go, by name.
    away: those of them that have no process to begin with. usage: by which their number follows; None for the
    scheduler's own."""

    period: float = 0.5
    thresholds: Thresholds = field(default_factory=Thresholds)
    groups: Mapping[str, GroupSpec] = field(default_factory=dict)
    away: frozenset[str] = frozenset()
    usage: Callable[[UnitLoad], float] | None = None


def rescheduling(
    spec: SchedulerSpec, groups: Mapping[str, GroupSpec] | None = None, away: frozenset[str] = frozenset()
) -> Rescheduling:
    """As a config says it."""
    return Rescheduling(spec.period, Thresholds(spec.out, spec.into), groups or {}, away)


@asynccontextmanager
async def rescheduled(
    router: Router, clock: Clock, given: Rescheduling, roster: Roster | None = None
) -> AsyncIterator[Rescheduler]:
    """Requests of `router` move while it is open, and units come and go where there is a roster."""
    async with Rescheduler(router, clock, roster) as rescheduler, asyncio.TaskGroup() as group:
        scheduler = FleetScheduler(
            rescheduler, clock, period=given.period, thresholds=given.thresholds, usage=given.usage
        )
        running = group.create_task(scheduler.run())
        try:
            yield rescheduler
        finally:
            running.cancel()
