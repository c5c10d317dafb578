"""What scheduling 64 instances costs (section 6.6).

Instances, links and time are virtual; the scheduler's, the router's and the engines' own calls are the real
ones, and what is told of them is CPU time of this machine. In virtual time they take none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import thread_time
from typing import Final

import numpy as np

from kvloom.cluster.scheduler import FleetScheduler
from kvloom.lab.reproduce.llumnix.point import INTERVAL
from kvloom.lab.reproduce.llumnix.setup import make_units
from kvloom.lab.reproduce.llumnix.traffic import SHORT
from kvloom.lab.reproduce.report import Grid, Report, Scale, Tell
from kvloom.lab.reproduce.setup import VOCAB, TellPart, check_answered, play_all, tell_each
from kvloom.lab.sim.fleet import SimulatedFleet, simulated
from kvloom.lab.sim.run import play
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.lab.workload.request import Prompts, RequestResult
from kvloom.router import Call
from kvloom.router.program import Program
from kvloom.router.replicas import Fleet
from kvloom.router.rescheduling import Rescheduler
from kvloom.types.client import Frames
from kvloom.types.clock import Clock
from kvloom.types.service import FleetState, Pairs, Steps

STRESSED: Final = 64  # instances
RATES: Final = (32.0, 64.0, 96.0, 128.0, 160.0)  # requests a second; sixteen instances take 36 of S-S
REQUESTS: Final = 3000
PERIOD: Final = 0.5  # seconds: the scheduler's, and a report's

_STRESS_HEADS: Final = (
    "req/s", "gateway: a dispatch", "P99", "of a core", "scheduler: a period", "longest", "of a core",
    "engine: a report", "of a core", "between tokens", "moved",
)  # fmt: skip


@dataclass(slots=True)
class Meter:
    """CPU seconds of single calls."""

    spent: list[float] = field(default_factory=list)

    def measure(self, call: Callable[[], None]) -> None:
        began = thread_time()
        call()
        self.spent.append(thread_time() - began)

    @property
    def mean(self) -> float:
        return sum(self.spent) / len(self.spent)

    def quantile(self, part: float) -> float:
        return float(np.quantile(self.spent, part))


@dataclass(frozen=True, slots=True)
class Stress:
    """rate: requests a second. decode: mean seconds between tokens, in virtual time."""

    rate: float
    dispatch: Meter
    period: Meter
    report: Meter
    decode: float
    moved: int

    @property
    def cores(self) -> tuple[float, float, float]:
        """The part of a core of each process: the gateway's for dispatch, the scheduler's, and an engine's,
        whose load gateway and scheduler each want once a period."""
        return self.rate * self.dispatch.mean, self.period.mean / PERIOD, 2 * self.report.mean / PERIOD


class Watched:
    """Satisfies `FleetControl`: between a state and the pairs that follow on it nothing runs but the fleet
    scheduler."""

    def __init__(self, fleet: Rescheduler, meter: Meter) -> None:
        self._fleet = fleet
        self._meter = meter
        self._began = 0.0

    async def state(self) -> FleetState:
        state = await self._fleet.state()
        self._began = thread_time()
        return state

    async def pair(self, pairs: Pairs) -> None:
        self._meter.spent.append(thread_time() - self._began)
        await self._fleet.pair(pairs)

    async def scale(self, steps: Steps) -> None:
        await self._fleet.scale(steps)


def section_66(scale: Scale, tell: Tell) -> Report:
    """64 instances at rising rates."""
    rates, requests = (RATES, REQUESTS) if scale == "full" else (RATES[:1], 60)
    found = play_all(
        rates, lambda rate, part: stress(rate, requests, part), lambda rate: f"{rate:g} req/s", tell
    )
    return report_66(found)


def stress(rate: float, requests: int, tell: TellPart) -> Stress:
    """Raises RuntimeError if a request is not answered."""
    return run_virtual(_Stress(rate, requests, tell).main())


class _Stress:
    def __init__(self, rate: float, requests: int, tell: TellPart) -> None:
        self._rate = rate
        self._requests = requests
        self._tell = tell_each(tell, requests)
        self._dispatch, self._period, self._report = Meter(), Meter(), Meter()
        self._steps: list[float] = []

    async def main(self) -> Stress:
        clock = LoopClock(asyncio.get_running_loop())
        units = make_units(STRESSED)
        async with (
            simulated(units, Program("freest, timed", self._freest, {})) as fleet,
            Rescheduler(fleet.router, clock) as rescheduler,
            asyncio.TaskGroup() as group,
        ):
            scheduler = FleetScheduler(Watched(rescheduler, self._period), clock, period=PERIOD)
            watching = [group.create_task(scheduler.run()), group.create_task(self._ask(fleet, clock))]
            requests = SHORT.requests(self._rate, self._requests)
            await play(fleet.server, requests, Prompts(VOCAB), clock, self._add, interval=INTERVAL)
            for task in watching:
                task.cancel()
        return Stress(
            self._rate,
            self._dispatch,
            self._period,
            self._report,
            sum(self._steps) / len(self._steps),
            rescheduler.moved,
        )

    async def _freest(self, call: Call, fleet: Fleet) -> Frames:
        """The program that is shipped, and what its choice costs."""
        chosen = []
        self._dispatch.measure(lambda: chosen.append(fleet.freest()))
        async for frame in call.start_generate(chosen[0]):
            yield frame

    async def _ask(self, fleet: SimulatedFleet, clock: Clock) -> None:
        """Asks each engine for its load once a second, which takes nobody's time here."""
        while True:
            for engine in fleet.engines.values():
                began = thread_time()
                await engine.load()
                self._report.spent.append(thread_time() - began)
            await clock.sleep(1.0)

    def _add(self, result: RequestResult) -> None:
        check_answered(result)
        if result.per_token is not None:
            self._steps.append(result.per_token)
        self._tell(result)


def report_66(found: Sequence[Stress]) -> Report:
    return Report(
        name="section 6.6",
        title=f"{STRESSED} instances under stress: S-S",
        grids=(
            Grid(
                title="ours, CPU time of scheduling, means where nothing else is said",
                heads=_STRESS_HEADS,
                rows=tuple(_rows(found)),
            ),
        ),
    )


def _rows(found: Sequence[Stress]) -> Iterator[tuple[str, ...]]:
    for one in found:
        gateway, scheduler, engine = (f"{part:.2%}" for part in one.cores)
        yield (
            f"{one.rate:g}",
            f"{one.dispatch.mean * 1e6:.0f} µs",
            f"{one.dispatch.quantile(0.99) * 1e6:.0f} µs",
            gateway,
            f"{one.period.mean * 1e3:.2f} ms",
            f"{one.period.quantile(1.0) * 1e3:.1f} ms",
            scheduler,
            f"{one.report.mean * 1e6:.0f} µs",
            engine,
            f"{one.decode * 1e3:.1f} ms",
            f"{one.moved:,}",
        )
