"""A roster over a fleet, for tests that are the supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvloom.core.errors import Unavailable
from kvloom.core.replicas import GroupSpec, Scale
from kvloom.router.rescheduling import Rescheduler
from kvloom.router.roster import Roster
from tests.router.fleets import Fleets, routed


@dataclass
class Staged:
    """A fleet whose processes the test starts and ends. orders: what was asked, in order. told: the units
    that are to go, each time. starts, ends: until then nothing that was asked for happens."""

    fleets: Fleets
    roster: Roster
    rescheduler: Rescheduler
    orders: list[str] = field(default_factory=list)
    told: list[set[str]] = field(default_factory=list)
    starts: asyncio.Event = field(default_factory=asyncio.Event)
    ends: asyncio.Event = field(default_factory=asyncio.Event)
    problem: Unavailable | None = None

    def states(self) -> dict[str, str]:
        return dict(self.fleets.router.services)


@asynccontextmanager
async def staged(units: int, scale: Scale, *, patience: float = 60.0) -> AsyncIterator[Staged]:
    """One group of replicas, that all serve at first."""
    async with routed(units, patience=patience) as fleets:

        async def start(unit: str) -> None:
            played.orders.append(f"start {unit}")
            await played.starts.wait()
            if played.problem is not None:
                raise played.problem
            fleets.world.engines[unit].down = False

        async def stop(unit: str) -> None:
            played.orders.append(f"stop {unit}")
            fleets.world.engines[unit].restart()
            fleets.world.engines[unit].down = True
            await played.ends.wait()

        roster = Roster(
            fleets.router,
            groups={"g": GroupSpec(tuple("abcdefgh"[:units]), scale)},
            start=start,
            stop=stop,
            changed=lambda units: played.told.append({*units}),
        )
        played = Staged(fleets, roster, Rescheduler(fleets.router, fleets.clock, roster))
        played.ends.set()
        async with roster:
            yield played
