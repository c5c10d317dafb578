"""Units that come and go in virtual time: all is answered, the same as without, and no block is left."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from msgspec import structs

from kvloom.engine.engine import Engine
from kvloom.engine.freeness import Thresholds
from kvloom.lab.sim.fleet import ReschedulingSettings, SimulatedFleet, run_fleet
from kvloom.lab.sim.processes import Census
from kvloom.lab.sim.run import MOVING_FRAMES, count_fleet_events, simulate
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.lab.sim.virtual_time import run_virtual
from kvloom.lab.workload.request import RequestResult, WorkloadRequest
from kvloom.lab.workload.results import FleetEvents, Results
from kvloom.lab.workload.summary import Summary
from kvloom.router.program import load_program
from kvloom.types.request import SamplingParams, StartGenerate, TokenEvent
from kvloom.types.service import GroupSpec, Scale
from tests.lab.sim.fleets import asks, check_whole, prompt_of, unit
from tests.lab.sim.test_cpu import overhead
from tests.modelled_units import ManualClock
from tests.plan.cost.test_cpu import cpu_costs

START = 0.05  # seconds
MOST = 3
SCALE = Scale(least=1, most=MOST, low=60.0, high=300.0, seconds=0.04, idle=0.3)


def units(start: float = START) -> list[SimulatedUnit]:
    plain = [unit(f"unit-{i}", ("small",), blocks=200) for i in range(MOST)]
    return [replace(one, spec=structs.replace(one.spec, lease=1.0), start=start) for one in plain]


def rescheduling(scale: Scale = SCALE) -> ReschedulingSettings:
    """One unit serves at first."""
    names = tuple(f"unit-{i}" for i in range(MOST))
    return ReschedulingSettings(
        0.05, Thresholds(24, 48), {"all": GroupSpec(names, scale)}, frozenset(names[1:])
    )


def crowd(count: int = 80) -> list[WorkloadRequest]:
    """A rush, and a few stragglers."""
    rush = asks(count, seed=5, rate=250.0, models=["small"])
    calm = [replaced(ask, 1.0 + ask.at) for ask in asks(4, seed=6, rate=6.0, models=["small"])]
    return [*rush, *calm]


def replaced(ask: WorkloadRequest, at: float) -> WorkloadRequest:
    return WorkloadRequest(at=at, model=ask.model, prompt=ask.prompt, output=ask.output)


@dataclass
class Seen:
    """tokens: of each request. engines: all that there ever were; preempted: choices, by all of them.
    left: engines at the end."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    engines: list[Engine] = field(default_factory=list)
    fleet_events: FleetEvents | None = None
    states: set[str] = field(default_factory=set)
    preempted: int = 0
    left: int = 0


def streamed(asked: Sequence[WorkloadRequest], given: ReschedulingSettings | None, seed: int = 0) -> Seen:
    """Every stream is read to its end, and all pools are whole afterwards."""
    seen = Seen()

    async def stream(fleet: SimulatedFleet, number: int, ask: WorkloadRequest) -> None:
        await asyncio.sleep(ask.at)
        body = StartGenerate(
            model=ask.model,
            request=f"ask-{number}",
            prompt=prompt_of(number, ask),
            sampling=SamplingParams(max_tokens=ask.output, seed=number),
            interval=MOVING_FRAMES,
        )
        tokens = seen.tokens[number] = []
        async with aclosing(fleet.router.start_generate(body)) as frames:
            async for frame in frames:
                for event in frame:
                    if isinstance(event, TokenEvent):
                        assert event.index == len(tokens)
                        tokens.append(event.token)

    async def watch(fleet: SimulatedFleet) -> None:
        while True:
            seen.engines += [one for one in fleet.engines.values() if one not in seen.engines]
            seen.states |= set(fleet.router.services.values())
            await asyncio.sleep(0.01)

    async def main() -> None:
        async with run_fleet(units(), load_program("freest"), rescheduling=given) as fleet:
            watching = asyncio.create_task(watch(fleet))
            async with asyncio.TaskGroup() as group:
                for number, ask in enumerate(asked):
                    group.create_task(stream(fleet, number, ask))
            seen.fleet_events = await count_fleet_events(fleet)
            watching.cancel()
            await asyncio.sleep(2.0)  # leases end
            loads = [await engine.load() for engine in seen.engines]
            seen.preempted = sum(load.models["small"].preemptions_total for load in loads)
            assert await fleet.processes.preemptions() == seen.preempted
            seen.left = len(fleet.engines)

    run_virtual(main(), seed=seed)
    check_whole(seen.engines)
    return seen


def simulated_results(
    given: Sequence[SimulatedUnit], asked: Sequence[WorkloadRequest], **more: Any
) -> Results:
    return simulate(given, load_program("freest"), asked, prompt_of, Summary(), title="", **more)


def test_units_come_for_a_rush_and_go_after_it_and_no_stream_sees_it() -> None:
    alone, elastic = streamed(crowd(), None), streamed(crowd(), rescheduling())
    assert elastic.tokens == alone.tokens
    assert [len(tokens) for tokens in elastic.tokens.values()] == [ask.output for ask in crowd()]
    told = elastic.fleet_events
    assert told is not None
    assert told.moved
    assert told.preempted == elastic.preempted > 0
    assert elastic.left == 1
    assert (told.least, told.most) == (1, MOST)
    assert 1.0 < told.units < MOST
    assert {"starting", "away"} <= elastic.states
    assert len(elastic.engines) >= MOST
    assert elastic.fleet_events == streamed(crowd(), rescheduling()).fleet_events


def test_what_runs_at_a_unit_that_is_one_too_many_moves() -> None:
    """It need not wait for the end of what runs there."""
    long = [WorkloadRequest(at=0.0, model="small", prompt=9, output=240) for _ in range(MOST)]
    fewer = Scale(least=1, most=MOST, low=0.0, high=1.0, seconds=0.0)
    given = replace(rescheduling(fewer), period=0.02, away=frozenset())
    streams = streamed(long, given)
    told = streams.fleet_events
    assert told is not None
    assert told.moved == MOST - 1
    assert (told.least, told.most, streams.left) == (1, MOST, 1)
    assert streams.tokens == streamed(long, None).tokens


def test_a_model_goes_to_none_and_comes_back_when_it_is_asked_for() -> None:
    gone = Scale(least=0, most=1, seconds=0.04, idle=0.3)
    given = replace(rescheduling(), groups={"all": GroupSpec(("unit-0",), gone)})
    late = [
        replaced(ask, at)
        for ask, at in zip(asks(2, seed=1, rate=1.0, models=["small"]), (0.0, 5.0), strict=True)
    ]
    found: list[RequestResult] = []
    results = simulated_results(
        units(start=7.0)[:1],
        late,
        tell=found.append,
        rescheduling=replace(given, away=frozenset()),
    )
    assert [(one.error, one.tokens) for one in found] == [("", ask.output) for ask in late]
    first, second = (one.first for one in found)
    assert first is not None
    assert second is not None
    assert first < 0.5
    assert 7.0 < second < 7.5
    assert results.fleet_events is not None
    assert (results.fleet_events.least, results.fleet_events.most) == (0, 1)


def test_requests_that_wait_for_longer_than_their_patience_are_told() -> None:
    gone = GroupSpec(("unit-0",), Scale(least=0, most=1, seconds=0.04, idle=0.3))
    late = [WorkloadRequest(at=at, model="small", prompt=9, output=3) for at in (0.0, 5.0)]
    results = simulated_results(
        units(start=7.0)[:1],
        late,
        rescheduling=ReschedulingSettings(0.02, groups={"all": gone}),
        patience=3.0,
    )
    assert (results.total.requests, results.total.errors) == (2, 1)


def test_engines_that_come_and_go_on_a_machine_that_was_measured() -> None:
    found = cpu_costs(overhead("gateway", request=1e-4), overhead("engine", request=1e-3, token=1e-5))
    results = simulated_results(
        units(),
        crowd(),
        cpu_costs=found,
        rescheduling=rescheduling(),
    )
    assert (results.total.errors, results.total.output_tokens) == (0, sum(ask.output for ask in crowd()))
    assert results.fleet_events is not None
    assert (results.fleet_events.least, results.fleet_events.most) == (1, MOST)


def test_the_order_of_what_happens_at_once_is_of_no_matter() -> None:
    found = streamed(crowd(30), rescheduling(), seed=1)
    assert [len(tokens) for tokens in found.tokens.values()] == [ask.output for ask in crowd(30)]


def test_each_number_of_units_counts_for_as_long_as_it_lasts() -> None:
    clock = ManualClock()
    census = Census(clock)
    for _ in range(3):
        census.more()
    assert (census.mean, census.least, census.most) == (3.0, 3, 3)
    clock.time = 10.0
    census.less()
    census.less()
    clock.time = 15.0
    census.more()
    census.less()  # lasts no time
    clock.time = 20.0
    assert census.mean == pytest.approx((3 * 10 + 1 * 10) / 20)
    assert (census.least, census.most) == (1, 3)
    census.less()
    assert census.mean == pytest.approx(2.0)
    assert census.least == 0
