"""A roster over a fleet, for tests that are the supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvloom.router.rescheduling import Rescheduler
from kvloom.router.roster import Roster
from kvloom.types.errors import Unavailable
from kvloom.types.request import ModelCard
from kvloom.types.service import GroupSpec, Scale
from kvloom.types.spec import EngineSpec, ModelSpec
from tests.router.fleets import Fleets, routed
from tests.router.ledger import LedgerEngine


def spec(name: str) -> EngineSpec:
    return EngineSpec(
        unit=name,
        models=(ModelSpec(name="m", path="/m"),),
        kv_bytes=1 << 20,
        block_bytes=256,
        policy="fcfs",
        max_running=1,
        max_waiting=1,
        chunk_tokens=1,
        threads=1,
    )


class Orders:
    """Satisfies `Processes`. done: what was asked, in order. starts, ends: until then nothing that was asked
    for happens. problem: what a start dies of."""

    def __init__(self, fleets: Fleets) -> None:
        self.done: list[str] = []
        self.starts = asyncio.Event()
        self.ends = asyncio.Event()
        self.ends.set()
        self.problem: Unavailable | None = None
        self._engines = fleets.world.engines

    async def start(self, spec: EngineSpec) -> None:
        self.done.append(f"start {spec.unit}")
        await self.starts.wait()
        if self.problem is not None:
            raise self.problem
        self._engines[spec.unit].down = False

    async def stop(self, unit: str, cards: Sequence[ModelCard]) -> None:
        assert {card.name for card in cards} <= {"m"}
        self.done.append(f"stop {unit}")
        self._engines[unit].restart()
        self._engines[unit].down = True
        await self.ends.wait()

    def forget(self, unit: str) -> None:
        self.done.append(f"forget {unit}")


@dataclass
class Staged:
    """A fleet whose processes the test starts and ends. told: the units that are to go and the
    seconds that they are given, each time."""

    fleets: Fleets
    roster: Roster
    rescheduler: Rescheduler
    orders: Orders
    told: list[dict[str, float | None]]

    def states(self) -> dict[str, str]:
        return dict(self.fleets.router.services)


@asynccontextmanager
async def staged(units: int, scale: Scale | None, *, patience: float = 60.0) -> AsyncIterator[Staged]:
    """One group of replicas, that all serve at first; no group without a scale."""
    async with routed(units, patience=patience) as fleets:

        async def connect(unit: str) -> LedgerEngine:
            return fleets.world.engines.get(unit) or fleets.world.engine(unit)

        names, orders = tuple("abcdefgh"[:units]), Orders(fleets)
        told: list[dict[str, float | None]] = []
        roster = Roster(
            fleets.router,
            specs=map(spec, names),
            groups={"g": GroupSpec(names, scale)} if scale else {},
            processes=orders,
            connect=connect,
            changed=lambda units: told.append({**units}),
            memory=1 << 30,
            cores=4,
        )
        played = Staged(fleets, roster, Rescheduler(fleets.router, fleets.clock, roster), orders, told)
        async with roster:
            yield played
