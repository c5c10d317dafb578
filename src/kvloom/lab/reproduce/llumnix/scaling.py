"""Scaling to as many instances as the load needs (section 6.5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvloom.engine.freeness import Thresholds, wanted
from kvloom.lab.reproduce.llumnix.point import Point, play_point, shown_times, units_of
from kvloom.lab.reproduce.llumnix.setup import INSTANCES, SIZES, make_units
from kvloom.lab.reproduce.llumnix.systems import BLOCK, INFAAS, LLUMNIX, OWN, System
from kvloom.lab.reproduce.llumnix.traffic import LONG
from kvloom.lab.reproduce.report import Cell, Claim, Grid, Options, Report, Scale, Tell, cells
from kvloom.lab.reproduce.setup import TellPart, play_or_read, tell_each
from kvloom.lab.sim.fleet import ReschedulingSettings
from kvloom.lab.workload.arrivals import gamma, poisson
from kvloom.types.service import GroupSpec
from kvloom.types.service import Scale as Range

SYSTEMS: Final = (INFAAS, LLUMNIX, OWN)
LOW: Final = 10  # blocks a request in the mean, below which there is to be one more instance
BAND: Final = 50  # blocks more, above which one less
CHECK: Final = 10.0  # seconds for which it must be so
FIRST: Final = 8  # instances to begin with, of 16
CHEAPER: Final = 36.0  # %, of instances, at equal P99 prefill
EQUAL: Final = 0.02  # of it two measures count as equal
NO_MOVES: Final = Thresholds(-math.inf, math.inf)

_HEADS: Final = (
    "", "threshold", "system", "prefill", "P99", "decode", "P99", "instances", "preempted", "moved",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """A load of L-L. `cv` is that of the arrivals' gaps; None stands for Poisson. `paper` has the P99 prefill
    in seconds and the mean instances, each under INFaaS++ and under Llumnix."""

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
    """`low` is the mean of blocks a request below which there is to be one more instance."""

    load: Load
    system: System
    point: Point
    low: float = LOW


def section_65(scale: Scale, tell: Tell, options: Options | None = None) -> Report:
    """Plays three systems at each second load, and at one of them with other thresholds."""
    options = options or Options()
    loads: tuple[Load, ...] = LOADS[::2] if scale == "full" else LOADS[:1]
    if options.rates:
        loads = tuple(_load(rate) for rate in options.rates)
    plan = [(load, system, float(LOW)) for load in loads for system in SYSTEMS]
    if options.thresholds:
        swept = loads if options.rates else (SWEPT,)
        plan = [(load, system, low) for load in swept for low in options.thresholds for system in SYSTEMS]
    elif scale == "full" and not options.rates:
        plan += [(SWEPT, system, low) for low in LOWS if low != LOW for system in SYSTEMS]
    instances, count = SIZES[scale]
    count = options.requests or count

    def play(run: tuple[Load, System, float], part: TellPart) -> Point:
        load, system, low = run
        traffic = replace(LONG, gaps=poisson if load.cv is None else gamma(load.cv))
        requests = traffic.requests(load.rate * instances / INSTANCES, count)
        given = elastic(system, low, instances)
        point = play_point(given, units_of(given, instances), requests, tell_each(part, count))
        return replace(point, results=())

    def name(run: tuple[Load, System, float]) -> str:
        load, system, low = run
        return f"{load}, {system.name}, {low:g}, {count} requests"

    points = play_or_read(options.kept, Point, plan, play, name, tell)
    return report_65(
        [Run(load, system, point, low) for (load, system, low), point in zip(plan, points, strict=True)]
    )


def _load(rate: float) -> Load:
    return next((one for one in LOADS if one.cv is None and one.rate == rate), Load(rate, None))


def elastic(system: System, low: float, instances: int) -> System:
    """Returns the system, with one instance to so many. `low` is the blocks a request below which there is to
    be one more. A system that moves nothing counts memory as INFaaS++ does."""
    names = tuple(unit.spec.unit for unit in make_units(instances))
    scale = Range(least=1, most=instances, low=BLOCK * low, high=BLOCK * (low + BAND), seconds=CHECK)
    own = system.rescheduling or ReschedulingSettings(thresholds=NO_MOVES, usage=wanted)
    first = max(1, FIRST * instances // INSTANCES)
    return replace(
        system,
        rescheduling=replace(own, groups={"all": GroupSpec(names, scale)}, away=frozenset(names[first:])),
    )


def report_65(runs: Sequence[Run]) -> Report:
    """Returns the report. `runs` has all systems for each load and threshold, in the order of SYSTEMS."""
    sets = [runs[at : at + len(SYSTEMS)] for at in range(0, len(runs), len(SYSTEMS))]
    plain = [one for one in sets if one[0].low == LOW] or sets
    claims = []
    for at, own in enumerate(SYSTEMS[1:], 1):
        pairs = [(one[0], one[at]) for one in plain]
        for said, of in _NEVER:
            claims.append(_never(own, said, pairs, of))
    return Report(
        name="section 6.5",
        title="as many instances as the load needs: L-L, at most 16",
        cells=(*(cell for one in plain for run in one for cell in _cells(run)), *_cost(runs)),
        claims=tuple(claims),
        grids=(Grid(title="ours, means and P99", heads=_HEADS, rows=tuple(map(_row, runs))),),
    )


_NEVER: Final[tuple[tuple[str, Callable[[Point], float]], ...]] = (
    ("P99 prefill is never longer", lambda one: one.prefill.p99),
    ("there are never more instances", lambda one: one.units),
)


def _cells(one: Run) -> Iterator[Cell]:
    """Yields the numbers of the systems that the paper has."""
    if one.system not in (INFAAS, LLUMNIX):
        return
    at = (INFAAS, LLUMNIX).index(one.system)
    p99, units = (column[at] for column in one.load.paper) if one.load.paper else (None, None)
    yield from cells(
        f"{one.load}, {one.system.name}",
        ("P99 prefill, s", p99, one.point.prefill.p99),
        ("instances", units, one.point.units),
    )


def _never(own: System, said: str, pairs: Sequence[tuple[Run, Run]], of: Callable[[Point], float]) -> Claim:
    """Returns the claim. `pairs` are runs under INFaaS++ and under `own`."""
    ratios = [(of(other.point) / of(one.point), str(one.load)) for other, one in pairs]
    (least, at), (most, best) = min(ratios), max(ratios)
    return Claim(
        said=f"under {own.name} {said} than under {INFAAS.name}",
        holds=least >= 1 - EQUAL,
        found=f"{INFAAS.name}'s over {own.name}'s: {least:.2f} ({at}) to {most:.2f} ({best})",
    )


def _cost(runs: Sequence[Run]) -> Iterator[Cell]:
    """Yields what is saved against INFaaS++ at its P99, by system, if there are runs with several
    thresholds."""
    for load in dict.fromkeys(run.load for run in runs):
        swept = [one for one in runs if one.load == load]
        if len({one.low for one in swept}) == 1:
            continue
        for own in SYSTEMS[1:]:
            found = list(savings(swept, own))
            if found:
                yield Cell(
                    row=f"{load}, {own.name}, at INFaaS++'s P99",
                    column="% fewer instances",
                    paper=CHEAPER if own is LLUMNIX else None,
                    ours=100 * max(found),
                )


def savings(runs: Sequence[Run], own: System) -> Iterator[float]:
    """Yields what `own` saves against each run under INFaaS++ at the same P99, which lies between two of its
    own runs with other thresholds; instances are straight in the logarithm of P99 there. Runs that are
    quicker or slower than all of its own tell nothing."""
    points = sorted((math.log(one.point.prefill.p99), one.point.units) for one in runs if one.system is own)
    times, units = zip(*points, strict=True)
    for one in (run.point for run in runs if run.system is INFAAS):
        at = math.log(one.prefill.p99)
        if times[0] <= at <= times[-1]:
            yield 1 - float(np.interp(at, times, units)) / one.units


def _row(one: Run) -> tuple[str, ...]:
    point = one.point
    times = shown_times(point.prefill, point.decode)
    counts = f"{point.units:.1f}", f"{point.preemptions:,}"
    moved = f"{point.moved:,}" if one.system.rescheduling else "–"
    return (str(one.load), f"{one.low:g}", one.system.name, *times, *counts, moved)
