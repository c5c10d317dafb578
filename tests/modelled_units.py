"""Modelled engines that reach each other, and the verbs' bodies for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from kvloom.engine.engine import Engine
from kvloom.lab.sim.links import ModelledTransport
from kvloom.types.request import SamplingParams, StartGenerate
from kvloom.types.spec import Policy
from kvloom.types.verbs import Prepared, PrepRecv, RemoteSend, Sent
from tests.modelled import ModelledExecutor, engine_over, modelled, turns
from tests.plane import Plane

MODEL = "wide"  # 4 tokens a page


class ManualClock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


@dataclass
class Unit:
    engine: Engine
    executor: ModelledExecutor
    transport: ModelledTransport
    clock: ManualClock

    async def pass_time(self, seconds: float) -> None:
        self.clock.time += seconds
        await self.engine.abort("nobody")  # the loop looks at the clock when something happens
        await turns()

    async def settled(self) -> None:
        """Until no sender holds what was given up."""
        while any(entry.closing for entry in self.transport.ledger.values()):
            await self.pass_time(1)

    @property
    def computed(self) -> int:
        return sum(job.tokens.size for job in self.executor.jobs)


@asynccontextmanager
async def units(
    count: int, *, seed: int = 0, blocks: int = 160, policy: Policy = "adbs"
) -> AsyncIterator[list[Unit]]:
    plane, made = Plane(seed), []
    async with AsyncExitStack() as stack:
        for i in range(count):
            executor = ModelledExecutor(blocks, seed=seed + i)
            transport, clock = plane.join(f"unit-{i}", executor), ManualClock()
            engine = engine_over(executor, transport, clock=clock, policy=policy)
            await stack.enter_async_context(modelled(engine, executor))
            made.append(Unit(engine, executor, transport, clock))
        yield made


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first * 131 + i * 7) % 1000 for i in range(length)]


def generate(tokens: list[int], *, begin: int = 0, request: str = "r", **sampling: object) -> StartGenerate:
    params = {"max_tokens": 6, "seed": 3} | sampling
    return StartGenerate(
        model=MODEL,
        request=request,
        prompt=tokens,
        begin=begin,
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
    )


def sending(
    tokens: list[int], spot: Prepared, begin: int = 0, end: int | None = None, request: str = "r"
) -> RemoteSend:
    return RemoteSend(
        model=MODEL,
        request=request,
        prompt=tokens,
        address=spot.address,
        peer=spot.peer,
        begin=begin,
        end=end,
    )


async def move(
    source: Unit, target: Unit, tokens: list[int], end: int | None
) -> tuple[Prepared, Sent | None]:
    """Room at `target`, filled by `source`; None where `target` had all of it."""
    spot = await target.engine.prep_recv(PrepRecv(model=MODEL, request="r", prompt=tokens, end=end))
    if spot.matched == spot.end:
        return spot, None
    return spot, await source.engine.remote_send(sending(tokens, spot, spot.matched, spot.end, "r"))
