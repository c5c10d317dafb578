"""As many instances as the load needs (section 6.5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

from kvloom.cluster.freeness import Thresholds, wanted
from kvloom.lab.sim.fleet import Rescheduling
from kvloom.reproduce.llumnix.point import INFAAS, LLUMNIX, Point, System, play_point
from kvloom.reproduce.llumnix.setup import INSTANCES, LONG, SIZES, make_units
from kvloom.reproduce.report import Cell, Claim, Grid, Report, Scale, Tell, part_of
from kvloom.types.service import GroupSpec
from kvloom.types.service import Scale as Range
from kvloom.workload.arrivals import gamma, poisson

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
    """Both systems at each load, and at one of them with other thresholds."""
    loads = LOADS if scale == "full" else LOADS[:1]
    plan = [(load, system, LOW) for load in loads for system in (INFAAS, LLUMNIX)]
    if scale == "full":
        plan += [(SWEPT, system, low) for low in LOWS if low != LOW for system in (INFAAS, LLUMNIX)]
    return report_of(
        [run(*one, scale, part_of(tell, at, len(plan))) for at, one in enumerate(plan)],
    )


def run(load: Load, system: System, low: int, scale: Scale, tell: Tell) -> Run:
    instances, requests = SIZES[scale]
    traffic = replace(LONG, gaps=poisson if load.cv is None else gamma(load.cv))
    over = count(1)
    point = play_point(
        elastic(system, low, instances),
        make_units(instances),
        traffic.asks(load.rate * instances / INSTANCES, requests),
        lambda _: tell(f"{load}, {system.name}", next(over) / requests),
    )
    return Run(load, system, point, low)


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


def report_of(runs: Sequence[Run]) -> Report:
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
        row = f"{one.load}, {one.system.name}"
        p99, units = (column[at] for column in paper) if paper else (None, None)
        yield Cell(row=row, column="P99 prefill, s", paper=p99, ours=one.point.prefill.p99)
        yield Cell(row=row, column="instances", paper=units, ours=one.point.units)


def _never(said: str, pairs: Sequence[tuple[Run, Run]], of: Callable[[Point], float]) -> Claim:
    ratios = [(of(other.point) / of(own.point), str(own.load)) for other, own in pairs]
    (least, at), (most, best) = min(ratios), max(ratios)
    return Claim(
        said=said,
        holds=least >= 1 - EQUAL,
        found=f"there {least:.2f} times as much at the least ({at}), {most:.2f} at the most ({best})",
    )


def _cost(runs: Sequence[Run]) -> Iterator[Cell]:
    """By the runs with different thresholds, where there are any."""
    swept = [one for one in runs if one.load == SWEPT]
    if len({one.low for one in swept}) > 1:
        most = max(_savings(swept), default=0.0)
        yield Cell(row=f"{SWEPT}, P99 no longer", column="% fewer instances", paper=CHEAPER, ours=100 * most)


def _savings(runs: Sequence[Run]) -> Iterator[float]:
    """For each run under INFaaS++ what the cheapest under Llumnix saves that has no longer a P99."""
    for infaas in (one.point for one in runs if one.system is INFAAS):
        others = (one.point for one in runs if one.system is LLUMNIX)
        as_quick = [one.units for one in others if one.prefill.p99 <= infaas.prefill.p99]
        if as_quick:
            yield 1 - min(as_quick) / infaas.units


def _row(one: Run) -> tuple[str, ...]:
    point = one.point
    times = (
        f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
        for measure in (point.prefill, point.decode)
        for seconds in (measure.mean, measure.p99)
    )
    counts = f"{point.units:.1f}", f"{point.preemptions:,}"
    moved = f"{point.moved:,}" if one.system is LLUMNIX else "–"
    return (str(one.load), f"{one.low}", one.system.name, *times, *counts, moved)
