"""Serving under load (section 6.3): figure 11, as published and as kvloom does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from operator import attrgetter
from statistics import mean
from typing import Final

from kvloom.lab.reproduce.llumnix.curves import Curves, read_curves
from kvloom.lab.reproduce.llumnix.point import Point, play_point, units_of
from kvloom.lab.reproduce.llumnix.setup import DRAWS, INSTANCES, SIZES
from kvloom.lab.reproduce.llumnix.systems import (
    INFAAS,
    INFAAS_BY_COUNT,
    LLUMNIX,
    LLUMNIX_BY_COUNT,
    OWN,
    OWN_INFAAS,
    ROUND_ROBIN,
    System,
)
from kvloom.lab.reproduce.llumnix.traffic import (
    BURSTGPT,
    SHAREGPT,
    TRAFFICS,
    Traffic,
    chosen_rates,
    chosen_traffic,
)
from kvloom.lab.reproduce.report import Cell, Claim, Grid, Options, Report, Scale, Tell, duration
from kvloom.lab.reproduce.setup import TellPart, play_or_read, tell_each

PUBLISHED_SYSTEMS: Final = (ROUND_ROBIN, INFAAS, LLUMNIX)  # whose curves the paper draws
OTHERS: Final = (INFAAS_BY_COUNT, LLUMNIX_BY_COUNT, OWN_INFAAS, OWN)
DRAWN: Final = (SHAREGPT.name, BURSTGPT.name)  # for which the paper draws round-robin too
EQUAL: Final = 0.02  # of it two latencies count as equal
BETTER: Final = 3.0  # INFaaS++'s P99 prefill over Llumnix's at its best rate, in every curve of the paper
MUCH_BETTER: Final = 9.0  # the same of round-robin's
FACTOR, MOST = 2.0, 0.8  # within which INFaaS++'s P99 prefill is to be, and at how many of the points
APART: Final = 1.3  # times: from there on the order of two systems is looked at

Measure = Callable[[Point], float]
_PREFILL: Final[Measure] = attrgetter("prefill.p99")
_DECODE: Final[Measure] = attrgetter("decode.p99")
MEASURES: Final[Mapping[str, tuple[str, float, Measure]]] = {
    "request_mean_s": ("mean request, s", 1.0, attrgetter("request.mean")),
    "request_p99_s": ("P99 request, s", 1.0, attrgetter("request.p99")),
    "prefill_mean_s": ("mean prefill, s", 1.0, attrgetter("prefill.mean")),
    "prefill_p99_s": ("P99 prefill, s", 1.0, _PREFILL),
    "decode_mean_s": ("mean decode, ms", 1e3, attrgetter("decode.mean")),
    "decode_p99_s": ("P99 decode, ms", 1e3, _DECODE),
    "preemption_loss_mean_s": ("preemption loss, s", 1.0, attrgetter("loss")),
}
"""The columns of figure 11, as the data file names them: what the reader sees, and its part of the unit."""
_HEADS: Final = (
    "", "req/s", "system", *(name.split(",")[0] for name, _, _ in MEASURES.values()), "preempted", "moved",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """The points of one system at one rate, in all draws."""

    traffic: Traffic
    rate: float
    system: System
    draws: tuple[Point, ...]

    def mean(self, of: Measure) -> float:
        return mean(map(of, self.draws))


def figure_11(scale: Scale, tell: Tell, options: Options | None = None) -> Report:
    """Plays INFaaS++ and Llumnix at the first, the middle and the last one of the published rates, and all
    others at the middle one. If rates are chosen, all systems are played at those."""
    options, curves = options or Options(), read_curves()
    own = TRAFFICS if scale == "full" else (SHAREGPT,)
    plan = [
        (traffic, rate, system)
        for traffic in chosen_traffic(options, own)
        for rates in (chosen_rates(options, traffic, _thinned(traffic.rates, scale)),)
        for rate in rates
        for system in _systems(traffic, others=bool(options.rates) or rate == rates[len(rates) // 2])
    ]
    instances, count = SIZES[scale]
    count, draws = options.requests or count, options.draws or DRAWS[scale]

    def play(run: tuple[Traffic, float, System, int], part: TellPart) -> Point:
        traffic, rate, system, draw = run
        requests = traffic.requests(rate * instances / INSTANCES, count, draw)
        point = play_point(system.of(traffic), units_of(system, instances), requests, tell_each(part, count))
        return replace(point, results=())

    def name(run: tuple[Traffic, float, System, int]) -> str:
        traffic, rate, system, draw = run
        return f"{traffic.name}, {rate:g} req/s, {system.name}, draw {draw + 1} of {count} requests"

    runs = [(*one, draw) for draw in range(draws) for one in plan]
    points = play_or_read(options.kept, Point, runs, play, name, tell)
    found = [Run(*one, tuple(points[at :: len(plan)])) for at, one in enumerate(plan)]
    return report_11(found, curves, count)


def _systems(traffic: Traffic, *, others: bool) -> tuple[System, ...]:
    if not others:
        return INFAAS, LLUMNIX
    return (*(PUBLISHED_SYSTEMS if traffic.name in DRAWN else PUBLISHED_SYSTEMS[1:]), *OTHERS)


def _thinned(rates: Sequence[float], scale: Scale) -> Sequence[float]:
    """Returns the first, the middle and the last rate; at the small scale it is the last alone."""
    if scale == "small" or len(rates) < 3:
        return rates[-1:]
    return rates[0], rates[len(rates) // 2], rates[-1]


def report_11(runs: Sequence[Run], curves: Curves, count: int) -> Report:
    """Returns the report. `runs` has all systems of each rate, and `count` is the number of requests of each
    draw."""
    draws = len(runs[0].draws)
    spread = f"means of {draws} draws, with the least and the most of one" if draws > 1 else "one draw"
    return Report(
        name="figure 11",
        title="16 LLaMA-7B on A10",
        cells=tuple(cell for run in runs for cell in _cells(run, curves)),
        claims=(
            *_against(runs, curves),
            *(
                claim
                for name in dict.fromkeys(run.traffic.name for run in runs)
                for claim in _claims(name, [run for run in runs if run.traffic.name == name])
            ),
        ),
        grids=(
            Grid(
                title=f"ours, {count:,} requests, {spread}",
                heads=_HEADS,
                rows=tuple(map(_row, runs)),
            ),
        ),
    )


def _cells(run: Run, curves: Curves) -> Iterator[Cell]:
    """Yields the columns of figure 11, of systems that the paper draws."""
    if run.system in PUBLISHED_SYSTEMS:
        for measure, (column, unit, of) in MEASURES.items():
            paper = curves.at(run.traffic.name, measure, run.system.name, run.rate)
            yield Cell(
                row=f"{run.traffic.name}, {run.rate:g} req/s, {run.system.name}",
                column=column,
                paper=None if paper is None else unit * paper,
                ours=unit * run.mean(of),
            )


def _against(runs: Sequence[Run], curves: Curves) -> Iterator[Claim]:
    """Yields what is wanted of the published systems, if their curves are here."""
    told = [
        (run.mean(_PREFILL) / paper, run)
        for run in runs
        if run.system is INFAAS
        and (paper := curves.at(run.traffic.name, "prefill_p99_s", INFAAS.name, run.rate))
    ]
    if not told:
        return
    near = [run for ratio, run in told if 1 / FACTOR <= ratio <= FACTOR]
    (least, low), (most, high) = (pick(told, key=lambda one: one[0]) for pick in (min, max))
    yield Claim(
        said=f"wanted: INFaaS++'s P99 prefill within a factor of {FACTOR:g} at {MOST:.0%} of the points",
        holds=len(near) >= MOST * len(told),
        found=f"at {len(near)} of {len(told)}: {least:.2f}× at the least ({_at(low)}), {most:.2f}× at the "
        f"most ({_at(high)})",
    )
    for measure, (column, _, of) in MEASURES.items():
        yield from _order(runs, curves, measure, column.split(",")[0], of)


def _at(run: Run) -> str:
    return f"{run.traffic.name}, {run.rate:g} req/s"


def _order(runs: Sequence[Run], curves: Curves, measure: str, column: str, of: Measure) -> Iterator[Claim]:
    """Yields whether two systems are in the paper's order, if that has them far apart."""
    known = [
        (run, paper)
        for run in runs
        if (paper := curves.at(run.traffic.name, measure, run.system.name, run.rate))
    ]
    pairs = [
        sorted((one, other), key=lambda each: each[1])
        for one, other in combinations(known, 2)
        if (one[0].traffic, one[0].rate) == (other[0].traffic, other[0].rate)
    ]
    far = [(one[0], other[0]) for one, other in pairs if other[1] > APART * one[1]]
    wrong = [(one, other) for one, other in far if one.mean(of) >= other.mean(of)]
    if far:
        others = "; ".join(f"{_at(one)}: {one.system.name}, {other.system.name}" for one, other in wrong)
        yield Claim(
            said=f"wanted: {column}: two systems in the paper's order where that has {APART:g}× between them",
            holds=not wrong,
            found=f"{len(far) - len(wrong)} of {len(far)}" + (f"; not {others}" if wrong else ""),
        )


def _claims(name: str, runs: Sequence[Run]) -> Iterator[Claim]:
    yield _no_worse(f"{name}: P99 prefill is never longer", runs, INFAAS, LLUMNIX, _PREFILL)
    yield _no_worse(f"{name}: P99 decode is never longer", runs, INFAAS, LLUMNIX, _DECODE)
    yield _at_best(name, runs, INFAAS, LLUMNIX, BETTER)
    yield _at_best(name, runs, INFAAS_BY_COUNT, LLUMNIX_BY_COUNT, BETTER)
    yield _at_best(name, runs, OWN_INFAAS, OWN, BETTER)
    if any(run.system is ROUND_ROBIN for run in runs):
        yield _at_best(name, runs, ROUND_ROBIN, LLUMNIX, MUCH_BETTER)
    yield _no_worse(f"{name}: kvloom's P99 prefill is never longer", runs, LLUMNIX, OWN, _PREFILL)


def _gains(runs: Sequence[Run], over: System, own: System, of: Measure) -> list[tuple[float, float]]:
    """Returns the measure under `over` divided by that under `own`, at each rate at which both were played,
    with the rate."""
    found = {(run.rate, run.system.name): run.mean(of) for run in runs}
    rates = [rate for rate, name in found if name == over.name and (rate, own.name) in found]
    return [(found[rate, over.name] / found[rate, own.name], rate) for rate in rates]


def _no_worse(said: str, runs: Sequence[Run], over: System, own: System, of: Measure) -> Claim:
    (least, at), (most, best) = (pick(_gains(runs, over, own, of)) for pick in (min, max))
    return Claim(
        said=f"{said} than under {over.name}",
        holds=least >= 1 - EQUAL,
        found=f"{over.name}'s over {own.name}'s: {least:.2f} ({at:g} req/s) to {most:.2f} ({best:g})",
    )


def _at_best(name: str, runs: Sequence[Run], over: System, own: System, times: float) -> Claim:
    most, rate = max(_gains(runs, over, own, _PREFILL))
    return Claim(
        said=f"{name}: at its best rate {own.name} has at most 1/{times:g} of {over.name}'s P99 prefill",
        holds=most >= times,
        found=f"{over.name}'s over {own.name}'s: {most:.2f} ({rate:g} req/s)",
    )


def _row(run: Run) -> tuple[str, ...]:
    found = [_spread([of(point) for point in run.draws], duration) for _, _, of in MEASURES.values()]
    preempted = _spread([point.preemptions for point in run.draws], lambda count: f"{count:,.0f}")
    moved = _spread([point.moved for point in run.draws], lambda count: f"{count:,.0f}")
    counts = preempted, moved if run.system.rescheduling else "–"
    return (run.traffic.name, f"{run.rate:g}", run.system.name, *found, *counts)


def _spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    middle = show(mean(values))
    return f"{middle} ({show(min(values))} – {show(max(values))})" if len(values) > 1 else middle
