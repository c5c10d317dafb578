"""Requests that move, in virtual time: what they wait for at the target, and what those who are there do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
from msgspec import structs

from kvloom.engine.reservations import LONGEST_PART, LONGEST_WAIT
from kvloom.lab.sim.fleet import SimulatedFleet, run_fleet
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.plan.cost.work import CostModel, Work
from kvloom.router.program import load_program
from kvloom.router.progress import RequestProgress
from kvloom.types.job import Phase
from kvloom.types.load import STEP_WINDOW
from kvloom.types.request import Event, SamplingParams, StartGenerate, TokenEvent
from kvloom.types.spec import Policy
from kvloom.types.verbs import PrepRecv
from tests.lab.sim.fleets import unit, virtually
from tests.modelled_units import ManualClock

STEP = 0.02  # seconds
PHASES = 12  # of a step
TOKENS = 80


class Even:
    """Satisfies `CostModel`: all jobs take the same time, or all decode steps of a model."""

    def __init__(self, seconds: float = STEP, **models: float) -> None:
        self._seconds = seconds
        self._models = models

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        return self._models.get(work.model, self._seconds)


class Uneven:
    """Satisfies `CostModel`: of a decode step by how many there were before."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds = seconds
        self._steps = -1

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        if work.phase is Phase.PREFILL:
            return STEP
        self._steps += 1
        return self._seconds(self._steps)


@asynccontextmanager
async def fleet(cost: CostModel | None = None, max_running: int = 16) -> AsyncIterator[SimulatedFleet]:
    """Two units, asked in turn, a millisecond away."""
    units = [replace(unit(f"unit-{i}", ["small"]), cost=cost or Even(), max_steps=1) for i in range(2)]
    units = [replace(one, spec=structs.replace(one.spec, max_running=max_running)) for one in units]
    async with run_fleet(units, load_program("data_parallel"), delay=0.001) as made:
        yield made


async def gaps_of(name: str, fleet: SimulatedFleet, step: float = STEP) -> list[float]:
    """Between its tokens, but for the first, in steps."""
    sampling = SamplingParams(max_tokens=TOKENS, seed=1)
    body = StartGenerate(model="small", request=name, prompt=[*name.encode()], sampling=sampling)
    clock, times = LoopClock(asyncio.get_running_loop()), list[float]()
    async for frame in fleet.router.start_generate(body):
        times += [clock.now() for event in frame if isinstance(event, TokenEvent)]
    assert len(times) == TOKENS
    return [(after - before) / step for before, after in pairwise(times[1:])]


def announced(request: str, due: float | None) -> PrepRecv:
    """due: in steps."""
    return PrepRecv(model="small", request=request, prompt=[1] * 9, due=due and due * STEP)


@pytest.mark.parametrize("phase", range(PHASES))
@virtually
async def test_it_stands_still_for_a_step_at_most(phase: int) -> None:
    """However much later than the source's the target's steps end. If nobody waited it were 1.08 at worst."""
    async with fleet() as made, asyncio.TaskGroup() as group:
        mover = group.create_task(gaps_of("mover", made))
        await asyncio.sleep((1 + phase / PHASES) * STEP)
        there = group.create_task(gaps_of("there", made))
        await asyncio.sleep(20.5 * STEP)
        await made.router.move("mover", "unit-1")
        assert max(await mover) - 1 <= 0.75
        late = max(await there) - 1
        assert late <= LONGEST_PART
        assert (late > 0.01) == (phase in (0, 1, 9, 10, 11))  # the others come before a step's end


@pytest.mark.parametrize(("due", "most"), [(0.3, LONGEST_PART), (0.6, 0.0), (None, 0.0)])
@virtually
async def test_who_is_announced_and_does_not_come_costs_little(due: float | None, most: float) -> None:
    """due: in steps, told just before a step ends."""
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


@virtually
async def test_who_gives_up_is_not_waited_for_but_the_next_one_is() -> None:
    async with fleet() as made, asyncio.TaskGroup() as group:
        engine = made.engines["unit-0"]
        there = group.create_task(gaps_of("there", made))
        await asyncio.sleep(20.9 * STEP)
        await engine.prep_recv(announced("r", 0.3))
        await engine.prep_recv(announced("s", 0.2))
        await asyncio.sleep(0.3 * STEP)  # a step ends meanwhile, and is not followed by another
        await engine.abort("s")
        await asyncio.sleep(0.1 * STEP)
        await engine.abort("r")
        late = max(await there) - 1
        assert late == pytest.approx(0.2)


@virtually
async def test_who_says_anew_when_it_comes_has_the_same_reservation() -> None:
    async with fleet() as made, asyncio.TaskGroup() as group:
        engine = made.engines["unit-0"]
        there = group.create_task(gaps_of("there", made))
        first = await engine.prep_recv(announced("r", 500.0))
        await asyncio.sleep(20.9 * STEP)
        assert await engine.prep_recv(announced("r", 0.3)) == first
        assert await engine.prep_recv(announced("r", None)) == first
        assert max(await there) - 1 == pytest.approx(LONGEST_PART)
        await engine.abort("r")


@pytest.mark.parametrize(
    ("cost", "at", "seconds"),
    [
        (lambda i: STEP if i else 10.0, 10.0 + 1.9 * STEP, 0.0),  # one step says nothing
        (lambda i: STEP if i >= STEP_WINDOW else 1.0, STEP_WINDOW + 2.9 * STEP, LONGEST_PART * STEP),
        (lambda i: 1.0, STEP_WINDOW + 0.999, LONGEST_WAIT),
    ],
)
@virtually
async def test_how_long_a_wait_is_when_steps_were_long(
    cost: Callable[[int], float], at: float, seconds: float
) -> None:
    """In seconds; at: since the first step began."""
    async with fleet(Uneven(cost)) as made, asyncio.TaskGroup() as group:
        there = group.create_task(gaps_of("there", made, 1.0))
        await asyncio.sleep(at + STEP + 0.001)
        await made.engines["unit-0"].prep_recv(announced("r", 0.3))
        gaps, steps = await there, [cost(i) for i in range(1, TOKENS)]
        late = [gap - step for gap, step in zip(gaps, steps, strict=False)]
        assert max(late) == pytest.approx(seconds, abs=1e-6)
        await made.engines["unit-0"].abort("r")


@pytest.mark.parametrize(("max_running", "most"), [(1, 0.0), (2, LONGEST_PART)])
@virtually
async def test_nobody_is_waited_for_where_no_more_may_run(max_running: int, most: float) -> None:
    async with fleet(max_running=max_running) as made, asyncio.TaskGroup() as group:
        there = group.create_task(gaps_of("there", made))
        await asyncio.sleep(20.95 * STEP)
        await made.engines["unit-0"].prep_recv(announced("r", 0.3))
        assert max(await there) - 1 == pytest.approx(most)
        await made.engines["unit-0"].abort("r")


@pytest.mark.parametrize("policy", get_args(Policy))
def test_no_other_model_waits(policy: Policy) -> None:
    """One of long steps and one of short ones side by side, and all the while somebody is announced."""

    async def tokens(due: float | None) -> dict[str, int]:
        shared = replace(unit(policy=policy, blocks=2000), cost=Even(small=0.1, deep=0.005), max_steps=1)
        told = dict.fromkeys(("small", "deep"), 0)
        async with run_fleet([shared], load_program("data_parallel"), delay=0.0001) as made:

            async def ask(model: str, tokens: int) -> None:
                sampling = SamplingParams(max_tokens=tokens, seed=1)
                for i in range(20):
                    body = StartGenerate(
                        model=model, request=f"{model}{tokens}-{i}", prompt=[1], sampling=sampling
                    )
                    async for frame in made.router.start_generate(body):
                        told[model] += sum(isinstance(event, TokenEvent) for event in frame)

            asking = [asyncio.ensure_future(ask(model, tokens)) for model in told for tokens in (240, 170)]
            for _ in range(250):
                for model in told:
                    body = PrepRecv(model=model, request=f"r-{model}", prompt=[7] * 9, due=due)
                    await made.engines["unit-0"].prep_recv(body)
                await asyncio.sleep(0.02)
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return told

    alone, beside = run_virtual(tokens(None)), run_virtual(tokens(0.0))
    assert alone == beside
    assert alone["small"] > 20


def test_steps_of_a_third_of_a_second_wait_too() -> None:
    """A move learns what a step takes without looking on for two of them."""
    step = 0.3

    async def main(phase: float) -> float:
        async with fleet(Even(step)) as made, asyncio.TaskGroup() as group:
            mover = group.create_task(gaps_of("mover", made, step))
            await asyncio.sleep((1 + phase) * step)
            there = group.create_task(gaps_of("there", made, step))
            await asyncio.sleep(20.5 * step)
            began = asyncio.get_running_loop().time()
            await made.router.move("mover", "unit-1")
            assert asyncio.get_running_loop().time() - began < 3.1 * step
            await mover
            return max(await there) - 1

    assert 0.01 < run_virtual(main(0.9)) <= LONGEST_WAIT / step + 1e-6
    assert run_virtual(main(0.5)) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("frame", "step"),
    [
        ([TokenEvent(0, 1, 5), TokenEvent(1, 0, 5)], 3.0),
        ([TokenEvent(0, 1, 5), TokenEvent(0, 2, 5)], None),  # of two steps
    ],
)
def test_what_a_caller_knows_of_steps(frame: list[Event], step: float | None) -> None:
    clock = ManualClock()
    progress = RequestProgress(2, clock)
    progress.take([TokenEvent(0, 0, 5)])
    assert progress.step is None
    clock.time += 3.0
    progress.take(frame)
    assert progress.step == step
