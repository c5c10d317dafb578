"""A router over modelled engines, and what its callers were told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvloom.router.program import load_program
from kvloom.router.replicas import Replica
from kvloom.router.router import Router
from kvloom.types.client import EngineClient
from kvloom.types.clock import WallClock
from kvloom.types.request import StartGenerate
from tests.engines import Answer
from tests.modelled import expected, turns
from tests.modelled_units import MODEL, Unit, units


class World:
    def __init__(self, router: Router, made: list[Unit]) -> None:
        self.router = router
        self.units = made
        self.answers: dict[str, Answer] = {}

    def ask(self, body: StartGenerate) -> asyncio.Task[None]:
        answer = self.answers[body.request] = Answer()

        async def read() -> None:
            async for frame in self.router.start_generate(body):
                answer.take(frame)

        return asyncio.create_task(read())

    async def until(self, request: str, tokens: int) -> None:
        """Each choice that has not ended has so many."""
        answer = self.answers[request]
        while not answer.tokens or min(map(len, answer.tokens.values())) < tokens:
            await turns(1)

    def check(self, body: StartGenerate) -> None:
        assert self.answers[body.request].tokens == expected(self.units[0].executor, body)

    def replica(self, unit: int) -> Replica:
        return self.router.units[f"unit-{unit}"].replicas[MODEL]

    @property
    def computed(self) -> int:
        return sum(unit.computed for unit in self.units)


@asynccontextmanager
async def world(
    count: int,
    *,
    blocks: int = 260,
    wire: Callable[[Unit], EngineClient] | None = None,
    program: str = "data_parallel",
) -> AsyncIterator[World]:
    """wire: how the router reaches a unit; left out, without one."""
    async with units(count, blocks=blocks) as made:
        clients = {f"unit-{i}": wire(unit) if wire else unit.engine for i, unit in enumerate(made)}
        async with Router(clients, load_program(program), WallClock()) as router:
            yield World(router, made)
            for unit in made:
                await unit.settled()
            assert not router.sessions
            assert all(unit.calls == 0 for unit in router.units.values())
