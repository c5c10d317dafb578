"""The cost of scheduling 64 instances, by kvloom and in one place (section 6.6).

Instances, links and time are virtual; the scheduler's, the router's and the engines' own calls are the real
ones, and what is told of them is CPU time of this machine. In virtual time they take none.

The baseline is one scheduler for all instances: each of their steps waits until it has decided the steps
that were asked for before. A decision takes what a step of kvloom's engine costs this machine, the
simulator's part of it included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import thread_time
from typing import Final

import numpy as np

from kvloom.cluster.scheduler import FleetScheduler
from kvloom.lab.reproduce.llumnix.point import INTERVAL, Times, play_point
from kvloom.lab.reproduce.llumnix.setup import KVLOOM, MODEL, make_units
from kvloom.lab.reproduce.llumnix.systems import System
from kvloom.lab.reproduce.llumnix.traffic import SHORT
from kvloom.lab.reproduce.report import Grid, Report, Scale, Tell
from kvloom.lab.reproduce.setup import VOCAB, TellPart, check_answered, play_all, tell_each
from kvloom.lab.sim.fleet import SimulatedFleet, run_fleet
from kvloom.lab.sim.run import send_workload
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.lab.workload.request import Prompts, RequestResult, WorkloadRequest
from kvloom.router import Call
from kvloom.router.program import Program, load_program
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
    "engine: a report", "of a core", "between tokens", "moved", "in one place: a stall", "P99",
    "between tokens",
)  # fmt: skip


@dataclass(slots=True)
class Meter:
    """A meter of the CPU seconds of single calls."""

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
    """The findings at one rate. `rate` is in requests a second, and `decode` the mean seconds between tokens,
    in virtual time."""

    rate: float
    dispatch: Meter
    period: Meter
    report: Meter
    decode: float
    moved: int
    stalls: Times
    """The stalls of each step if one scheduler decides all of them."""
    central: float
    """The mean seconds between tokens then."""

    @property
    def cores(self) -> tuple[float, float, float]:
        """Returns the part of a core of each process: the gateway's for dispatch, the scheduler's, and an
        engine's, whose load gateway and scheduler each want once a period."""
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


Decision = Callable[[int], float]  # seconds of deciding a step of so many sequences


def step_cost(few: int = 4, many: int = 64, tokens: int = 400) -> Decision:
    """Returns what a step of so many sequences costs one core of this machine: straight between two batches,
    of which each is decoded for `tokens` steps. The work of the simulator is in it."""

    def spent(count: int) -> float:
        asked = [WorkloadRequest(at=0.0, model=MODEL, prompt=16, output=tokens) for _ in range(count)]

        async def main() -> None:
            units = [replace(unit, max_steps=1) for unit in make_units(1)]
            clock = LoopClock(asyncio.get_running_loop())
            async with run_fleet(units, load_program("data_parallel", {})) as fleet:
                await send_workload(
                    fleet.server, asked, Prompts(VOCAB), clock, check_answered, interval=tokens
                )

        began = thread_time()
        run_virtual(main())
        return (thread_time() - began) / tokens

    low, high = spent(few), spent(many)
    each = max(0.0, (high - low) / (many - few))
    return lambda count: max(0.0, low + each * (count - few))


class Central:
    """One scheduler for the steps of all instances, which decides one after the other."""

    def __init__(self, decision: Decision) -> None:
        self._decision = decision
        self._free_at = 0.0
        self.stalls: list[float] = []

    def stall(self, sequences: int) -> float:
        """Returns the seconds for which a step that is asked for now has to wait."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + self._decision(sequences)
        self.stalls.append(self._free_at - now)
        return self.stalls[-1]


def section_66(scale: Scale, tell: Tell) -> Report:
    """Plays 64 instances at rising rates."""
    rates, requests = (RATES, REQUESTS) if scale == "full" else (RATES[:1], 60)
    decision = step_cost()
    found = play_all(
        rates, lambda rate, part: stress(rate, requests, decision, part), lambda rate: f"{rate:g} req/s", tell
    )
    return report_66(found)


def stress(rate: float, requests: int, decision: Decision, tell: TellPart) -> Stress:
    """Raises RuntimeError if a request is not answered. `decision` is that of the scheduler in one place."""
    central = Central(decision)
    units = [
        replace(unit, max_steps=1, engine_gap=lambda work: central.stall(work.batch))
        for unit in make_units(STRESSED)
    ]
    asked = SHORT.requests(rate, requests)
    system = System("in one place", KVLOOM, load_program("freest", {}))
    point = play_point(system, units, asked, tell_each(lambda part: tell(part / 2), requests))
    rest = _Stress(rate, requests, lambda part: tell((1 + part) / 2))
    return run_virtual(rest.main(Times.of(np.array(central.stalls)), point.decode.mean))


class _Stress:
    def __init__(self, rate: float, requests: int, tell: TellPart) -> None:
        self._rate = rate
        self._requests = requests
        self._tell = tell_each(tell, requests)
        self._dispatch, self._period, self._report = Meter(), Meter(), Meter()
        self._steps: list[float] = []

    async def main(self, stalls: Times, central: float) -> Stress:
        """Returns the findings. `stalls` and `central` are those of the scheduler in one place."""
        clock = LoopClock(asyncio.get_running_loop())
        units = make_units(STRESSED)
        async with (
            run_fleet(units, Program("freest, timed", self._freest, {})) as fleet,
            Rescheduler(fleet.router, clock) as rescheduler,
            asyncio.TaskGroup() as group,
        ):
            scheduler = FleetScheduler(Watched(rescheduler, self._period), clock, period=PERIOD)
            watching = [group.create_task(scheduler.run()), group.create_task(self._ask(fleet, clock))]
            requests = SHORT.requests(self._rate, self._requests)
            await send_workload(fleet.server, requests, Prompts(VOCAB), clock, self._add, interval=INTERVAL)
            for task in watching:
                task.cancel()
        return Stress(
            self._rate,
            self._dispatch,
            self._period,
            self._report,
            sum(self._steps) / len(self._steps),
            rescheduler.moved,
            stalls,
            central,
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
            *(f"{seconds * 1e3:.2f} ms" for seconds in (one.stalls.mean, one.stalls.p99)),
            f"{one.central * 1e3:.1f} ms",
        )
