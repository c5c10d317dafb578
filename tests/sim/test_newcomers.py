"""Requests that move, in virtual time: what they wait for at the target, and what those who are there do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import pytest

from kvloom.core.request import StartGenerate, TokenEvent
from kvloom.core.sampling import SamplingParams
from kvloom.core.verbs import PrepRecv
from kvloom.cost.work import Work
from kvloom.engine.arrivals import LONGEST
from kvloom.router.program import load_program
from kvloom.sim.clock import LoopClock
from kvloom.sim.fleet import SimulatedFleet, simulated
from kvloom.sim.loop import run_virtual
from tests.sim.fleets import unit

STEP = 0.02  # seconds
PHASES = 12  # of a step
TOKENS = 80


class Even:
    """Satisfies `CostModel`: all jobs take the same time."""

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        return STEP


@asynccontextmanager
async def fleet() -> AsyncIterator[SimulatedFleet]:
    """Two units, asked in turn, a millisecond away."""
    units = [replace(unit(f"unit-{i}", ["small"]), cost=Even(), stride=1) for i in range(2)]
    async with simulated(units, load_program("data_parallel"), delay=0.001) as made:
        yield made


async def gaps_of(name: str, fleet: SimulatedFleet) -> list[float]:
    """Between its tokens, but for the first, in steps."""
    sampling = SamplingParams(max_tokens=TOKENS, seed=1)
    body = StartGenerate(model="small", request=name, prompt=[*name.encode()], sampling=sampling)
    clock, times = LoopClock(asyncio.get_running_loop()), list[float]()
    async for frame in fleet.router.start_generate(body):
        times += [clock.now() for event in frame if isinstance(event, TokenEvent)]
    assert len(times) == TOKENS
    return [(after - before) / STEP for before, after in pairwise(times[1:])]


@pytest.mark.parametrize("phase", range(PHASES))
def test_it_stands_still_for_a_step_at_most(phase: int) -> None:
    """However much later than the source's the target's steps end. If nobody waited it were 1.08 at worst."""

    async def main() -> None:
        async with fleet() as made, asyncio.TaskGroup() as group:
            mover = group.create_task(gaps_of("mover", made))
            await asyncio.sleep((1 + phase / PHASES) * STEP)
            there = group.create_task(gaps_of("there", made))
            await asyncio.sleep(20.5 * STEP)
            await made.router.move("mover", "unit-1")
            assert max(await mover) - 1 <= 0.75
            late = max(await there) - 1
            assert late <= LONGEST
            assert (late > 0.01) == (phase in (0, 1, 9, 10, 11))  # the others come before a step's end

    run_virtual(main())


@pytest.mark.parametrize(("due", "most"), [(0.3, LONGEST), (0.6, 0.0), (None, 0.0)])
def test_who_is_announced_and_does_not_come_costs_little(due: float | None, most: float) -> None:
    """due: in steps, told just before a step ends."""

    async def main() -> None:
        async with fleet() as made, asyncio.TaskGroup() as group:
            engine = made.engines["unit-0"]
            there = group.create_task(gaps_of("there", made))
            await asyncio.sleep(0.95 * STEP)
            for i in range(40):
                await asyncio.sleep(STEP)
                body = PrepRecv(model="small", request=f"{i}", prompt=[i] * 9, due=due and due * STEP)
                await engine.prep_recv(body)
            gaps = await there
            for i in range(40):
                await engine.abort(f"{i}")
            assert max(gaps) - 1 == pytest.approx(most)
            assert max(sum(gaps[i : i + 8]) for i in range(len(gaps))) - 8 == pytest.approx(most)

    run_virtual(main())


def test_who_gives_up_is_not_waited_for() -> None:
    async def main() -> None:
        async with fleet() as made, asyncio.TaskGroup() as group:
            engine = made.engines["unit-0"]
            there = group.create_task(gaps_of("there", made))
            await asyncio.sleep(10.9 * STEP)
            await engine.prep_recv(PrepRecv(model="small", request="r", prompt=[1] * 9, due=0.3 * STEP))
            await asyncio.sleep(0.3 * STEP)  # a step ends meanwhile, and is not followed by another
            await engine.abort("r")
            late = max(await there) - 1
            assert late == pytest.approx(0.1)

    run_virtual(main())
