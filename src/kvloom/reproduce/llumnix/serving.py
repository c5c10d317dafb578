"""Serving performance under load (section 6.3): figure 11."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from kvloom.reproduce.llumnix.point import (
    BY_REPORTS,
    INFAAS,
    LLUMNIX,
    ROUND_ROBIN,
    Point,
    System,
    play_point,
)
from kvloom.reproduce.llumnix.published import Curves, read_curves
from kvloom.reproduce.llumnix.setup import (
    BURSTGPT,
    INSTANCES,
    LONG,
    MEDIUM,
    SHAREGPT,
    SIZES,
    Traffic,
    make_units,
)
from kvloom.reproduce.report import Cell, Claim, Grid, Report, Scale, Tell, part_of

SYSTEMS: Final[Mapping[str, tuple[System, ...]]] = {
    SHAREGPT.name: (ROUND_ROBIN, BY_REPORTS, INFAAS, LLUMNIX),
    BURSTGPT.name: (ROUND_ROBIN, BY_REPORTS, INFAAS, LLUMNIX),
    MEDIUM.name: (BY_REPORTS, INFAAS, LLUMNIX),  # round-robin is not drawn there
    LONG.name: (BY_REPORTS, INFAAS, LLUMNIX),
}
CURVES: Final = {BY_REPORTS.name: INFAAS.name}  # in the paper, where it is another's
TRAFFICS: Final = (SHAREGPT, BURSTGPT, MEDIUM, LONG)
EQUAL: Final = 0.02  # of it two latencies count as equal
BETTER: Final = 3.0  # times as short as under INFaaS++ at its best rate, in every curve of the paper
MUCH_BETTER: Final = 9.0  # than under round-robin

_HEADS: Final = (
    "", "req/s", "system", "prefill", "P99", "decode", "P99", "request", "P99", "preempted", "moved",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    traffic: Traffic
    rate: float
    system: System
    point: Point


def figure_11(scale: Scale, tell: Tell) -> Report:
    """All systems over the published rates."""
    curves = read_curves()
    chosen = TRAFFICS if scale == "full" else (SHAREGPT,)
    plan = [
        (traffic, rate, system)
        for traffic in chosen
        for rate in (traffic.rates if scale == "full" else traffic.rates[-1:])
        for system in SYSTEMS[traffic.name]
    ]
    runs = []
    for at, (traffic, rate, system) in enumerate(plan):
        runs.append(_run(traffic, rate, system, scale, part_of(tell, at, len(plan))))
    return report_of(runs, curves)


def _run(traffic: Traffic, rate: float, system: System, scale: Scale, tell: Tell) -> Run:
    instances, requests = SIZES[scale]
    over = count(1)
    point = play_point(
        system,
        make_units(instances),
        traffic.asks(rate * instances / INSTANCES, requests),
        lambda _: tell(f"{traffic.name}, {rate:g} req/s, {system.name}", next(over) / requests),
    )
    return Run(traffic, rate, system, point)


def report_of(runs: Sequence[Run], curves: Curves) -> Report:
    """runs: of each rate all of its systems, Llumnix last."""
    return Report(
        name="figure 11",
        title="16 LLaMA-7B on A10: P99 to the first token, and between tokens",
        cells=tuple(cell for run in runs for cell in _cells(run, curves)),
        claims=tuple(
            claim
            for name in dict.fromkeys(run.traffic.name for run in runs)
            for claim in _claims(name, [run for run in runs if run.traffic.name == name])
        ),
        grids=(Grid(title="ours, means and P99", heads=_HEADS, rows=tuple(map(_row, runs))),),
    )


def _cells(run: Run, curves: Curves) -> Iterator[Cell]:
    measures = (
        ("P99 prefill, s", "prefill_p99_s", run.point.prefill.p99, 1),
        ("P99 decode, ms", "decode_p99_s", run.point.decode.p99, 1000),
    )
    for column, measure, ours, unit in measures:
        name = CURVES.get(run.system.name, run.system.name)
        paper = curves.at(run.traffic.name, measure, name, run.rate)
        row = f"{run.traffic.name}, {run.rate:g} req/s, {run.system.name}"
        yield Cell(row=row, column=column, paper=paper and paper * unit, ours=ours * unit)


def _claims(name: str, runs: Sequence[Run]) -> Iterator[Claim]:
    for over in (INFAAS, BY_REPORTS):
        yield _no_worse(f"{name}: P99 prefill is never longer", runs, over, prefill_p99)
        yield _no_worse(f"{name}: P99 decode is never longer", runs, over, decode_p99)
        yield _at_best(name, runs, over, BETTER)
    if any(run.system is ROUND_ROBIN for run in runs):
        yield _at_best(name, runs, ROUND_ROBIN, MUCH_BETTER)


def prefill_p99(point: Point) -> float:
    return point.prefill.p99


def decode_p99(point: Point) -> float:
    return point.decode.p99


def _gains(runs: Sequence[Run], over: System, of: Callable[[Point], float]) -> list[tuple[float, float]]:
    """How many times as short it is under Llumnix, and at which rate."""
    found = {(run.rate, run.system.name): of(run.point) for run in runs}
    rates = dict.fromkeys(run.rate for run in runs)
    return [(found[rate, over.name] / found[rate, LLUMNIX.name], rate) for rate in rates]


def _no_worse(said: str, runs: Sequence[Run], over: System, of: Callable[[Point], float]) -> Claim:
    (least, at), (most, best) = (pick(_gains(runs, over, of)) for pick in (min, max))
    return Claim(
        said=f"{said} than under {over.name}",
        holds=least >= 1 - EQUAL,
        found=f"{least:.2f}× as short at the least ({at:g} req/s), {most:.2f}× at the most ({best:g})",
    )


def _at_best(name: str, runs: Sequence[Run], over: System, times: float) -> Claim:
    most, rate = max(_gains(runs, over, prefill_p99))
    return Claim(
        said=f"{name}: at the best rate P99 prefill is {times:g}× as short as under {over.name}, or shorter",
        holds=most >= times,
        found=f"{most:.2f}× at {rate:g} req/s",
    )


def _row(run: Run) -> tuple[str, ...]:
    point = run.point
    times = (
        f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
        for measure in (point.prefill, point.decode, point.request)
        for seconds in (measure.mean, measure.p99)
    )
    counts = f"{point.preemptions:,}", f"{point.moved:,}" if run.system.rescheduling else "–"
    return (run.traffic.name, f"{run.rate:g}", run.system.name, *times, *counts)
