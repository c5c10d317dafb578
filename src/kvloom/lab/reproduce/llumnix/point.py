"""One system under one load: how long its requests wait, and how long preempted ones stand still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvloom.lab.reproduce.llumnix.losses import PreemptionLosses
from kvloom.lab.reproduce.llumnix.setup import make_units
from kvloom.lab.reproduce.llumnix.systems import System, program_of
from kvloom.lab.reproduce.report import duration
from kvloom.lab.reproduce.setup import VOCAB, check_answered
from kvloom.lab.sim.fleet import SimulatedFleet, run_fleet
from kvloom.lab.sim.run import count_fleet_events, send_workload
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.lab.workload.request import Prompts, RequestResult, WorkloadRequest
from kvloom.lab.workload.results import FleetEvents
from kvloom.types.geometry import F64
from kvloom.types.load import UnitLoad
from kvloom.types.request import Level

INTERVAL: Final = 16  # tokens a frame: what a router knows of a request that is to move
SECOND: Final = 1.0  # between two looks

Look = Callable[[Sequence[UnitLoad]], None]


@dataclass(frozen=True, slots=True)
class Times:
    """The mean and the P99 of a time, in seconds."""

    mean: float
    p99: float

    @staticmethod
    def of(seconds: F64) -> Times:
        return Times(float(seconds.mean()), float(np.quantile(seconds, 0.99)))


def shown_times(*measures: Times) -> tuple[str, ...]:
    """Returns the mean and the P99 of each, for the reader."""
    return tuple(duration(seconds) for one in measures for seconds in (one.mean, one.p99))


@dataclass(frozen=True, slots=True)
class Point:
    """The results of one system at one load."""

    prefill: Times
    """The times to the first token."""
    decode: Times
    """The times between tokens, of the requests that had two."""
    request: Times
    """The times to the last token."""
    loss: float
    """The mean seconds, over all requests, for which a request stands still because it was preempted. The end
    of it is seen to within a frame of INTERVAL tokens."""
    preemptions: int
    moved: int
    """The number of requests that went over to another instance."""
    units: float
    """The mean number of instances until the last answer."""
    results: tuple[RequestResult, ...] = ()
    """The results of all requests, as they ended."""


def units_of(system: System, count: int, levels: tuple[Level, ...] = ()) -> list[SimulatedUnit]:
    """Returns the system's instances."""
    return make_units(count, levels, system.engine)


def play_point(
    system: System,
    units: list[SimulatedUnit],
    requests: Iterable[WorkloadRequest],
    tell: Callable[[RequestResult], None],
    look: Look | None = None,
) -> Point:
    """Plays requests to the system. `look` is given all loads once a second. Raises RuntimeError if a request
    is not answered."""
    results: list[RequestResult] = []
    program, serves = program_of(system.dispatch)

    def end(result: RequestResult) -> None:
        check_answered(result)
        results.append(result)
        tell(result)

    async def main() -> tuple[FleetEvents, PreemptionLosses]:
        clock = LoopClock(asyncio.get_running_loop())
        async with (
            run_fleet(units, program, rescheduling=system.rescheduling) as fleet,
            asyncio.TaskGroup() as group,
        ):
            serves(fleet)
            losses = PreemptionLosses(fleet.server, clock.now)
            fleet.journal.follow(losses.keep)
            looking = group.create_task(_look(fleet, clock, look)) if look else None
            await send_workload(losses, requests, Prompts(VOCAB), clock, end, interval=INTERVAL)
            if looking is not None:
                looking.cancel()
            return await count_fleet_events(fleet), losses

    found, losses = run_virtual(main())
    return Point(
        *latencies(results),
        loss=sum(map(sum, losses.seconds.values())) / len(results),
        preemptions=found.preempted,
        moved=found.moved or 0,
        units=found.units,
        results=tuple(results),
    )


async def _look(fleet: SimulatedFleet, clock: LoopClock, look: Look) -> None:
    while True:
        await clock.sleep(SECOND)
        look([engine.load_now() for engine in fleet.engines.values()])


def latencies(results: Iterable[RequestResult]) -> tuple[Times, Times, Times]:
    """Returns the times to the first token, between tokens, and to the last one."""
    rows = [(one.first, one.per_token, one.end) for one in results]
    first, between, last = zip(*rows, strict=True)
    steps = [seconds for seconds in between if seconds is not None]
    return Times.of(np.array(first)), Times.of(np.array(steps)), Times.of(np.array(last))
