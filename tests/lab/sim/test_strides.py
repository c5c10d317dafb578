"""Stepping over stretches in which nothing is decided changes nothing. What cuts a stride short: a send that
takes what it counts on, a lease that ends, a job that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvloom.engine.engine import Engine
from kvloom.lab.sim.content import JobFailed, NoContent
from kvloom.lab.sim.links import ModelledPlane, TimedLink
from kvloom.lab.sim.unit import SimulatedUnit, modelled_executor
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.types.job import Job
from kvloom.types.load import UnitLoad
from kvloom.types.request import EndEvent, Made, SamplingParams, StartGenerate
from kvloom.types.spec import Policy
from kvloom.types.verbs import Offer, PrepRecv, RemoteSend
from tests.lab.sim.fleets import SHAPES, asks, check_whole, outcomes, unit, virtually

STRIDES = [1, 4096]


class FailsAt(NoContent):
    """A job of many steps fails at one of them, by its model."""

    def __init__(self, steps: dict[str, int]) -> None:
        super().__init__({name: shape.vocab for name, shape in SHAPES.items()})
        self._steps = steps

    def draw(self, job: Job, step: int) -> list[int]:
        if job.steps > 1 and step == self._steps[job.model]:
            raise JobFailed("told to")
        return super().draw(job, step)


@asynccontextmanager
async def running(
    units: list[SimulatedUnit], content: NoContent | None = None
) -> AsyncIterator[list[Engine]]:
    """Engines while they run; at the end their pools are whole."""
    plane, clock = ModelledPlane(), LoopClock(asyncio.get_running_loop())
    engines = []
    for one in units:
        executor = modelled_executor(one, content)
        transport = plane.join(one.spec.unit, executor.blocks, TimedLink(2e4, 1e-4))
        engines.append(Engine(executor, transport, one.spec, clock))
    async with asyncio.timeout(600), asyncio.TaskGroup() as group:
        for engine in engines:
            group.create_task(engine.run())
        yield engines
        await asyncio.sleep(60)  # leases end
        check_whole(engines)
        for engine in engines:
            engine.stop()


async def ask(
    engine: Engine, name: str, prompt: list[int], most: int, model: str = "small", made: Sequence[Made] = ()
) -> list[float]:
    """When the first and the last event came, of which the last is an EndEvent."""
    sampling, times = SamplingParams(max_tokens=most, seed=1), []
    body = StartGenerate(model=model, request=name, prompt=prompt, sampling=sampling, made=list(made))
    async for frame in engine.start_generate(body):
        times += [asyncio.get_running_loop().time() for _ in frame]
        last = frame[-1] if frame else None
    assert isinstance(last, EndEvent)
    return [times[0], times[-1]]


def test_a_cached_send_takes_pages_that_a_stride_would_have_taken() -> None:
    async def main(stride: int) -> list[float]:
        sender, receiver = (
            replace(unit(name, ["small"], blocks=blocks), max_steps=stride)
            for name, blocks in (("a", 66), ("b", 400))
        )
        async with running([sender, receiver]) as (a, b), asyncio.TaskGroup() as group:
            prompt = list(range(1, 65))
            await ask(a, "first", prompt, 1)
            long = group.create_task(ask(a, "long", [400] * 10, 240))
            await asyncio.sleep(0.02)
            spot = await b.prep_recv(PrepRecv(model="small", request="s", prompt=prompt))
            await a.remote_send(
                RemoteSend(model="small", request="s", prompt=prompt, address=spot.address, peer=spot.peer)
            )
            return await long

    stepped, strode = (run_virtual(main(stride)) for stride in STRIDES)
    assert strode == pytest.approx(stepped, rel=1e-9)


@pytest.mark.parametrize("policy", ["adbs", "fcfs", "round-robin"])
def test_a_lease_that_ends_lets_in_who_waits(policy: Policy) -> None:
    async def main(stride: int) -> list[float]:
        one = replace(unit("a", ["small"], blocks=160, policy=policy), max_steps=stride)
        one = replace(one, spec=structs.replace(one.spec, lease=0.05))
        async with running([one]) as (engine,), asyncio.TaskGroup() as group:
            await engine.prep_recv(PrepRecv(model="small", request="r", prompt=[7] * 220))
            first = group.create_task(ask(engine, "one", [400] * 200, 50))
            await asyncio.sleep(0.03)
            second = group.create_task(ask(engine, "two", [401] * 230, 5))
            return [*await first, *await second]

    stepped, strode = (run_virtual(main(stride)) for stride in STRIDES)
    assert strode == pytest.approx(stepped, rel=1e-9)


@virtually
async def test_strides_that_fail_one_after_the_other_end_their_requests_alone() -> None:
    async with running([unit()], FailsAt({"small": 3, "deep": 12})) as (engine,):
        await asyncio.gather(*(ask(engine, model, [1, 2, 3], 60, model) for model in SHAPES))


def test_who_asks_for_the_load_cuts_nothing_and_sees_every_block() -> None:
    """And who asks for a request to move hears of the tokens that it has by then."""

    async def main(stride: int) -> tuple[list[int], int, list[str | None]]:
        seen: list[int] = []
        async with running([replace(unit("a", ["small"]), max_steps=stride)]) as [engine]:
            asking = asyncio.create_task(ask(engine, "it", list(range(8)), 64))
            for _ in range(20):
                await asyncio.sleep(0.002)
                load = await engine.load()
                seen.append(load.models["small"].used_blocks)
            offered = [(await engine.offer(Offer(destination=load))).request]
            await asyncio.sleep(0.015)  # steps
            offered.append((await engine.offer(Offer(destination=load))).request)
            await asking
        return seen, load.models["small"].decode_jobs_total, offered

    (stepped, jobs, offers), (strode, longer, later) = (run_virtual(main(stride)) for stride in STRIDES)
    assert strode == stepped
    assert later == offers == ["it", None]  # at the end too little of it is left
    assert jobs > 10
    assert longer == 1


def test_who_asks_what_could_move_does_not_wait_for_one_stride_after_the_other() -> None:
    """Of two models, either one's next step would be another stride while the other's ends."""

    async def main(stride: int) -> tuple[float, str | None]:
        async with running([replace(unit("a"), max_steps=stride)]) as [engine], asyncio.TaskGroup() as group:
            for model in SHAPES:
                group.create_task(ask(engine, model, [3] * 8, 200, model))
            await asyncio.sleep(0.05)
            load, began = await engine.load(), asyncio.get_running_loop().time()
            offered = await engine.offer(Offer(destination=load))
            return asyncio.get_running_loop().time() - began, offered.request

    (_, stepped), (waited, strode) = (run_virtual(main(stride)) for stride in STRIDES)
    assert strode == stepped in SHAPES
    assert waited < 0.01  # virtual seconds: some steps


def test_a_page_that_is_to_be_copied_is_copied_before_a_stride() -> None:
    """It is held until the copy's job has ended, and a pool just large enough has no room for both."""

    async def main(stride: int) -> float:
        async with running([replace(unit("a", ["small"], blocks=33), max_steps=stride)]) as [engine]:
            await ask(engine, "first", list(range(12)), 1)
            made = [Made(0, [7])]  # as of a request that has moved here: it decodes at once
            return (await ask(engine, "second", list(range(12)), 116, made=made))[-1]

    stepped, strode = (run_virtual(main(stride)) for stride in STRIDES)
    assert strode == pytest.approx(stepped)


def check_like(units: list[SimulatedUnit], *, seed: int, rate: float) -> None:
    played = asks(16, seed=seed, rate=rate, models=list(units[0].shapes))
    stepped, each_load = outcomes([replace(unit, max_steps=1) for unit in units], played)
    strode, load = outcomes(units, played)
    for ask, outcome in strode.items():
        assert outcome.tokens == ask.output == stepped[ask].tokens
        assert not outcome.error
        assert outcome.first == pytest.approx(stepped[ask].first, rel=1e-9)
        assert outcome.end == pytest.approx(stepped[ask].end, rel=1e-9)
    assert {name: paceless(one) for name, one in load.items()} == {
        name: paceless(one) for name, one in each_load.items()
    }


def paceless(load: UnitLoad) -> UnitLoad:
    """Of many steps in one only the mean is known."""
    models = {name: structs.replace(model, step_seconds=0.0) for name, model in load.models.items()}
    return structs.replace(load, models=models)


@pytest.mark.parametrize("models", [["small"], ["small", "deep"]])
@pytest.mark.parametrize("policy", get_args(Policy))
@settings(deadline=None, max_examples=4, derandomize=True)
@given(seed=st.integers(0, 2**32), rate=st.sampled_from([1.0, 5.0, 20.0, 200.0]))
def test_strides_change_nothing(models: list[str], policy: Policy, seed: int, rate: float) -> None:
    check_like([unit(models=models, policy=policy)], seed=seed, rate=rate)


@settings(deadline=None, max_examples=4, derandomize=True)
@given(seed=st.integers(0, 2**32), blocks=st.integers(66, 160))
def test_strides_change_nothing_in_a_short_pool(seed: int, blocks: int) -> None:
    check_like([unit(models=["small"], blocks=blocks)], seed=seed, rate=50)


@pytest.mark.parametrize("models", [["small"], ["small", "deep"]])
@settings(deadline=None, max_examples=8, derandomize=True)
@given(seed=st.integers(0, 2**32), blocks=st.integers(66, 400), rate=st.sampled_from([1.0, 20.0, 200.0]))
def test_steps_that_nobody_looks_at_end_when_they_would_one_by_one(
    models: list[str], seed: int, blocks: int, rate: float
) -> None:
    """To the last bit, and with the same loads."""
    foreseen = unit(models=models, blocks=blocks)
    looked_at = replace(foreseen, content=NoContent({name: shape.vocab for name, shape in SHAPES.items()}))
    played = asks(16, seed=seed, rate=rate, models=models)
    assert outcomes([foreseen], played) == outcomes([looked_at], played)
