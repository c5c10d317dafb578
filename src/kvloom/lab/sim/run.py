"""A workload played to a fleet in virtual time, and its results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final

from msgspec.structs import replace

from kvloom.journal.log import Journal
from kvloom.journal.records import Record
from kvloom.journal.samples import ModelTotals, Sample
from kvloom.lab.sim.cpu import SimulatedCpu
from kvloom.lab.sim.fleet import ReschedulingSettings, SimulatedFleet, run_fleet
from kvloom.lab.sim.recording import Recording, fleet_sample
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.lab.workload.request import RequestResult, Scaled, WorkloadRequest
from kvloom.lab.workload.results import FleetEvents, Results, Slept
from kvloom.lab.workload.summary import Histogram, Summary
from kvloom.plan.cost.cpu import CpuCosts
from kvloom.plan.cost.work import Work
from kvloom.router.program import Program
from kvloom.types.client import Generator
from kvloom.types.clock import Clock
from kvloom.types.errors import ConfigError, KvloomError
from kvloom.types.request import EndEvent, SamplingParams, StartGenerate, TokenEvent
from kvloom.types.service import PATIENCE

FEW_FRAMES: Final = 1024  # tokens a frame: only the first and the last one's times are told
MOVING_FRAMES: Final = 16  # where requests move: a router knows of one what it was told

PromptOf = Callable[[int, WorkloadRequest], list[int]]  # the token ids of a request, by its number


async def send_workload(
    server: Generator,
    requests: Iterable[WorkloadRequest],
    prompts: PromptOf,
    clock: Clock,
    tell: Callable[[RequestResult], None],
    *,
    interval: int = FEW_FRAMES,
) -> None:
    """Sends each request at its time, whatever became of those before (open loop). Requests come in order.
    interval: tokens a frame."""
    begin = clock.now()
    async with asyncio.TaskGroup() as group:
        for number, request in enumerate(requests):
            wait = begin + request.at - clock.now()
            if wait > 0:
                await clock.sleep(wait)
            group.create_task(_send(server, number, request, prompts, clock, tell, interval))


async def _send(
    server: Generator,
    number: int,
    request: WorkloadRequest,
    prompts: PromptOf,
    clock: Clock,
    tell: Callable[[RequestResult], None],
    interval: int,
) -> None:
    body = StartGenerate(
        model=request.model,
        request=f"ask-{number}",
        prompt=prompts(number, request),
        sampling=SamplingParams(max_tokens=request.output, seed=number),
        priority=request.priority,
        interval=interval,
    )
    begin, first, last, tokens, cached, problem = clock.now(), None, None, 0, 0, ""
    try:
        async with aclosing(server.start_generate(body)) as frames:
            async for frame in frames:
                came = clock.now() - begin
                for event in frame:
                    if isinstance(event, TokenEvent):
                        tokens, last = tokens + 1, came
                        first = came if first is None else first
                    elif isinstance(event, EndEvent):
                        cached, problem = event.cached_tokens, event.message or _missing(tokens, request)
    except KvloomError as error:
        problem = error.message
    tell(RequestResult(request=request, first=first, end=last, tokens=tokens, cached=cached, error=problem))


def _missing(tokens: int, request: WorkloadRequest) -> str:
    """Tells, as `kvloom bench serve` does, that a context was too short."""
    return "fewer tokens than were asked for" if tokens < request.output else ""


def simulate(
    units: Sequence[SimulatedUnit],
    program: Program,
    requests: Iterable[WorkloadRequest],
    prompts: PromptOf,
    summary: Summary,
    *,
    title: str,
    seed: int | None = None,
    tell: Callable[[RequestResult], None] = lambda _: None,
    cpu_costs: CpuCosts | None = None,
    client_here: bool = False,
    rescheduling: ReschedulingSettings | None = None,
    patience: float = PATIENCE,
    homes: Mapping[str, str] | None = None,
    keep: Callable[[Sequence[Record]], None] = lambda _: None,
    recording: Recording | None = None,
) -> Results:
    """Adds all results to `summary`, and tells each.

    seed: of the order of what happens at one moment. cpu_costs: those of the one machine that all units are
    on; None if only jobs take time. client_here: whether the client is there too. rescheduling: of the fleet
    scheduler; None if there is none. patience: the router's. homes: the machine of each unit, if there are
    several. keep: takes the records of the fleet's journal. recording: looks on, for a page."""

    def add(outcome: RequestResult) -> None:
        summary.add(outcome)
        if recording is not None:
            recording.answered(outcome)
        tell(outcome)

    async def main() -> FleetEvents:
        clock = LoopClock(asyncio.get_running_loop())
        journal = Journal(clock)
        journal.follow(keep)
        cpu = SimulatedCpu(cpu_costs, client_here=client_here) if cpu_costs else None
        frames = MOVING_FRAMES if rescheduling else FEW_FRAMES
        async with run_fleet(
            units,
            program,
            cpu=cpu,
            rescheduling=rescheduling,
            patience=patience,
            homes=homes or {},
            journal=journal,
        ) as fleet:
            if recording is not None:
                journal.follow(recording.keep)
                recording.keep(journal.since(0))
                recording.begin(partial(_sample, fleet, homes or {}))
            await send_workload(fleet.server, requests, prompts, clock, add, interval=frames)
            if recording is not None:
                recording.end()
            return await count_fleet_events(fleet)

    events = run_virtual(main(), seed=seed)
    return replace(summary.results("simulation", title), fleet_events=events)


def _sample(
    fleet: SimulatedFleet, homes: Mapping[str, str], at: float, totals: tuple[ModelTotals, ...]
) -> Sample:
    units = {name: unit.engine for name, unit in fleet.controller.spec.units.items()}
    return fleet_sample(at, totals, fleet.engines, fleet.router.services, units, homes)


async def count_fleet_events(fleet: SimulatedFleet) -> FleetEvents:
    """Returns what has been moved and started so far."""
    mover, census = fleet.rescheduler, fleet.processes.census
    return FleetEvents(
        preempted=await fleet.processes.preemptions(),
        moved=mover.moved if mover else None,
        stayed=mover.stayed if mover else None,
        units=census.mean,
        least=census.least,
        most=census.most,
        slept=slept(fleet),
    )


def slept(fleet: SimulatedFleet) -> Slept | None:
    """Returns what became of weights that can sleep so far; None if there are none."""
    weights = fleet.processes.weights
    if not weights:
        return None
    waits = Histogram()
    for one in weights:
        waits.merge(one.waits)
    wakes, sleeps = sum(one.wakes for one in weights), sum(one.sleeps for one in weights)
    return Slept(wakes=wakes, sleeps=sleeps, waited=waits.count, wait=waits.latency())


def scaled(units: Sequence[SimulatedUnit], scale: float) -> Scaled:
    """Returns the objective of an answer within `scale` times what a request takes alone on the best of the
    units that serve its model."""

    def alone(request: WorkloadRequest) -> float:
        return min(_alone(unit, request) for unit in units if request.model in unit.shapes)

    return Scaled(scale, alone)


def _alone(unit: SimulatedUnit, request: WorkloadRequest) -> float:
    """Returns the seconds of one prefill and the decode steps, as MuxServe adds them up (section 4.2)."""
    prefill = unit.cost.seconds(Work.prefill(request.model, 1.0, [request.prompt]))
    step = unit.cost.seconds(Work.decode(request.model, 1.0, [request.prompt + request.output // 2]))
    return prefill + (request.output - 1) * step


def check_models(asked: Iterable[str], units: Sequence[SimulatedUnit]) -> None:
    """Raises ConfigError if there are models that no unit serves."""
    served = {name for unit in units for name in unit.shapes}
    missing = [name for name in asked if name not in served]
    if missing:
        raise ConfigError(
            f"the workload asks for {', '.join(missing)}, which no unit serves; "
            f"{', '.join(sorted(served))} {'is' if len(served) == 1 else 'are'} served"
        )
