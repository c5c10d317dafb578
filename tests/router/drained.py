"""Drains over a fleet, for tests that are the supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvloom.router.drains import Drains
from kvloom.types.errors import Unavailable
from tests.router.fleets import Fleets, routed

SHORT, LONG = 0.01, 60.0


@dataclass
class Played:
    """Drains over a fleet whose processes the test starts anew. told: the drained units, each time."""

    fleets: Fleets
    drains: Drains
    told: list[set[str]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    starts: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    problem: Unavailable | None = None

    def states(self) -> dict[str, str]:
        return {state.name: state.state for state in self.drains.states}


@asynccontextmanager
async def drained(
    units: int, program: str = "data_parallel", *, seconds: float = LONG, patience: float = LONG
) -> AsyncIterator[Played]:
    async with routed(units, program, patience=patience) as fleets:

        async def restart(unit: str) -> None:
            engine = fleets.world.engines[unit]
            played.ends.append(unit)
            played.ended.set()
            engine.restart()
            engine.down = True
            await played.starts.wait()
            if played.problem is not None:
                raise played.problem
            engine.down = False

        drains = Drains(
            fleets.router,
            seconds=seconds,
            restart=restart,
            changed=lambda units: played.told.append({*units}),
        )
        played = Played(fleets, drains)
        async with drains:
            yield played
