"""As many instances as the load needs (section 6.5), and what scheduling 64 of them costs (section 6.6).

In section 6.6 instances, links and time are virtual; the scheduler's, the router's and the engines' own calls
are the real ones, and what is told of them is CPU time of this machine. In virtual time they take none.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import thread_time
from typing import Final

import numpy as np

from kvloom.cluster.scheduler import FleetScheduler
from kvloom.engine.freeness import Thresholds, wanted
from kvloom.lab.reproduce.llumnix.setup import (
    INFAAS,
    INSTANCES,
    INTERVAL,
    LLUMNIX,
    LONG,
    SHORT,
    SIZES,
    Point,
    System,
    make_units,
    play_point,
    shown_times,
)
from kvloom.lab.reproduce.report import Cell, Claim, Grid, Report, Scale, Tell, cells
from kvloom.lab.reproduce.setup import VOCAB, TellPart, check_answered, play_all, tell_each
from kvloom.lab.sim.fleet import Rescheduling, SimulatedFleet, simulated
from kvloom.lab.sim.run import play
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.lab.workload.arrivals import gamma, poisson
from kvloom.lab.workload.request import Prompts, RequestResult
from kvloom.router import Call
from kvloom.router.program import Program
from kvloom.router.replicas import Fleet
from kvloom.router.rescheduling import Rescheduler
from kvloom.types.client import Frames
from kvloom.types.clock import Clock
from kvloom.types.service import FleetState, GroupSpec, Pairs, Steps
from kvloom.types.service import Scale as Range

BLOCK: Final = 16  # tokens; its thresholds are blocks a request, ours decode steps
LOW: Final = 10  # blocks a request in the mean, below which there is to be one more instance
BAND: Final = 50  # blocks more, above which one less
CHECK: Final = 10.0  # seconds for which it must be so
FIRST: Final = 8  # instances to begin with, of 16
CHEAPER: Final = 36.0  # %, of instances, at equal P99 prefill
EQUAL: Final = 0.02
NO_MOVES: Final = Thresholds(-math.inf, math.inf)

_HEADS: Final = (
    "", "threshold", "system", "prefill", "P99", "decode", "P99", "instances", "preempted", "moved",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """L-L. cv: of the arrivals' gaps; None is Poisson. paper: P99 prefill in seconds and mean instances, each
    under INFaaS++ and under Llumnix."""

    rate: float
    cv: int | None
    paper: tuple[tuple[float, float], tuple[float, float]] | None = None

    def __str__(self) -> str:
        return f"{self.rate:g} req/s" if self.cv is None else f"CV {self.cv}"


LOADS: Final = (
    Load(2.0, None, ((9.1, 4.1), (11.6, 10.5))),
    Load(2.2, None, ((14.0, 4.5), (13.4, 11.6))),
    Load(2.4, None, ((11.7, 3.6), (13.8, 12.5))),
    Load(2.6, None, ((11.3, 3.5), (14.4, 13.6))),
    Load(2.8, None, ((28.5, 3.9), (15.1, 14.6))),
    Load(3.0, None, ((62.4, 5.1), (15.5, 15.0))),
    Load(2.0, 2, ((55.0, 9.5), (11.7, 10.7))),
    Load(2.0, 3, ((83.0, 12.1), (12.1, 10.9))),
    Load(2.0, 4, ((87.0, 12.7), (12.1, 11.0))),
    Load(2.0, 5, ((140.0, 15.3), (13.1, 11.1))),
    Load(2.0, 6, ((214.0, 19.4), (12.9, 11.1))),
)
SWEPT: Final = LOADS[8]  # with other thresholds too: the paper tells neither its load nor the thresholds
LOWS: Final = (5, 10, 20, 40)


@dataclass(frozen=True, slots=True)
class Run:
    """low: blocks a request in the mean below which there is to be one more instance."""

    load: Load
    system: System
    point: Point
    low: int = LOW


def section_65(scale: Scale, tell: Tell) -> Report:
    """Plays both systems at each load, and at one of them with other thresholds."""
    loads = LOADS if scale == "full" else LOADS[:1]
    plan = [(load, system, LOW) for load in loads for system in (INFAAS, LLUMNIX)]
    if scale == "full":
        plan += [(SWEPT, system, low) for low in LOWS if low != LOW for system in (INFAAS, LLUMNIX)]
    instances, count = SIZES[scale]

    def play(run: tuple[Load, System, int], part: TellPart) -> Run:
        load, system, low = run
        traffic = replace(LONG, gaps=poisson if load.cv is None else gamma(load.cv))
        requests = traffic.requests(load.rate * instances / INSTANCES, count)
        point = play_point(
            elastic(system, low, instances), make_units(instances), requests, tell_each(part, count)
        )
        return Run(load, system, point, low)

    return report_65(play_all(plan, play, lambda run: f"{run[0]}, {run[1].name}", tell))


def elastic(system: System, low: int, instances: int) -> System:
    """The system, with one instance to so many. One that moves nothing counts memory as INFaaS++ does."""
    names = tuple(unit.spec.unit for unit in make_units(instances))
    scale = Range(least=1, most=instances, low=BLOCK * low, high=BLOCK * (low + BAND), seconds=CHECK)
    own = system.rescheduling or Rescheduling(thresholds=NO_MOVES, usage=wanted)
    first = max(1, FIRST * instances // INSTANCES)
    return replace(
        system,
        rescheduling=replace(own, groups={"all": GroupSpec(names, scale)}, away=frozenset(names[first:])),
    )


def report_65(runs: Sequence[Run]) -> Report:
    """runs: of each load and threshold both systems, Llumnix second."""
    plain = [one for one in runs if one.low == LOW]
    pairs = list(zip(plain[::2], plain[1::2], strict=True))
    return Report(
        name="section 6.5",
        title="as many instances as the load needs: L-L, at most 16",
        cells=(*(cell for pair in pairs for cell in _cells(*pair)), *_cost(runs)),
        claims=(
            _never("P99 prefill is never longer than under INFaaS++", pairs, lambda one: one.prefill.p99),
            _never("there are never more instances than under INFaaS++", pairs, lambda one: one.units),
        ),
        grids=(Grid(title="ours, means and P99", heads=_HEADS, rows=tuple(map(_row, runs))),),
    )


def _cells(infaas: Run, llumnix: Run) -> Iterator[Cell]:
    paper = infaas.load.paper
    for at, one in enumerate((infaas, llumnix)):
        p99, units = (column[at] for column in paper) if paper else (None, None)
        yield from cells(
            f"{one.load}, {one.system.name}",
            ("P99 prefill, s", p99, one.point.prefill.p99),
            ("instances", units, one.point.units),
        )


def _never(said: str, pairs: Sequence[tuple[Run, Run]], of: Callable[[Point], float]) -> Claim:
    ratios = [(of(other.point) / of(own.point), str(own.load)) for other, own in pairs]
    (least, at), (most, best) = min(ratios), max(ratios)
    return Claim(
        said=said,
        holds=least >= 1 - EQUAL,
        found=f"there {least:.2f} times as much at the least ({at}), {most:.2f} at the most ({best})",
    )


def _cost(runs: Sequence[Run]) -> Iterator[Cell]:
    """Yields what Llumnix saves, if there are runs with different thresholds."""
    swept = [one for one in runs if one.load == SWEPT]
    if len({one.low for one in swept}) > 1:
        most = max(_savings(swept), default=0.0)
        yield Cell(row=f"{SWEPT}, P99 no longer", column="% fewer instances", paper=CHEAPER, ours=100 * most)


def _savings(runs: Sequence[Run]) -> Iterator[float]:
    """Yields for each run under INFaaS++ what the cheapest under Llumnix saves that has no longer a P99."""
    for infaas in (one.point for one in runs if one.system is INFAAS):
        others = (one.point for one in runs if one.system is LLUMNIX)
        as_quick = [one.units for one in others if one.prefill.p99 <= infaas.prefill.p99]
        if as_quick:
            yield 1 - min(as_quick) / infaas.units


def _row(one: Run) -> tuple[str, ...]:
    point = one.point
    times = shown_times(point.prefill, point.decode)
    counts = f"{point.units:.1f}", f"{point.preemptions:,}"
    moved = f"{point.moved:,}" if one.system is LLUMNIX else "–"
    return (str(one.load), f"{one.low}", one.system.name, *times, *counts, moved)


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
