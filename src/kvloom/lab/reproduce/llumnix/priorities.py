"""Urgent requests among others, in bursts (section 6.4): kvloom's Llumnix, with and without priorities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from msgspec import structs

from kvloom.lab.reproduce.llumnix.point import latencies, play_point, units_of
from kvloom.lab.reproduce.llumnix.setup import INSTANCES, POOL, SIZES
from kvloom.lab.reproduce.llumnix.systems import OWN
from kvloom.lab.reproduce.llumnix.traffic import SHORT
from kvloom.lab.reproduce.report import Cell, Claim, Grid, Report, Scale, Tell, cells
from kvloom.lab.reproduce.setup import TellPart, play_all, tell_each
from kvloom.lab.workload.arrivals import gamma
from kvloom.lab.workload.request import RequestResult, WorkloadRequest
from kvloom.types.request import Level

RATE: Final = 26.0
URGENT: Final = 0.1  # of the requests
TARGET: Final = 1600  # tokens of load beside which an urgent request is to run
LEVELS: Final = (Level(-1, POOL - TARGET),)
BURSTS: Final = (2, 4, 6, 8)  # the arrivals' coefficients of variation
# Seconds of urgent requests without and with priorities: means of all, to the first token, P99 of that,
# between tokens.
PAPER: Final = {
    2: ((6.64, 0.277, 2.40, 0.0532), (5.73, 0.096, 0.66, 0.0453)),
    4: ((7.31, 0.627, 5.18, 0.0593), (5.75, 0.109, 0.59, 0.0455)),
    6: ((8.25, 1.124, 7.60, 0.0664), (5.84, 0.131, 0.67, 0.0459)),
    8: ((8.54, 1.419, 8.90, 0.0698), (5.68, 0.170, 0.90, 0.0456)),
}
FASTER, SLOWER = 1.3, 0.05  # urgent requests at the most bursts; the others
_PRIORITY_COLUMNS: Final = ("mean", "mean prefill", "P99 prefill", "mean decode")


class Seconds(NamedTuple):
    """The mean seconds of whole requests and to the first token, the P99 of that, and the mean seconds
    between tokens."""

    request: float
    prefill: float
    prefill_p99: float
    decode: float

    @staticmethod
    def of(results: Sequence[RequestResult]) -> Seconds:
        prefill, decode, request = latencies(results)
        return Seconds(request.mean, prefill.mean, prefill.p99, decode.mean)


@dataclass(frozen=True, slots=True)
class Found:
    urgent: Seconds
    others: Seconds


@dataclass(frozen=True, slots=True)
class PriorityRun:
    """The findings at one burst. In `plain` nobody knows what is urgent, and in `ranked` everybody does."""

    burst: int
    plain: Found
    ranked: Found


def section_64(scale: Scale, tell: Tell) -> Report:
    """Plays S-S in bursts, in which a tenth of the requests is urgent."""
    bursts = BURSTS if scale == "full" else BURSTS[1:2]

    def name(run: tuple[int, bool]) -> str:
        cv, ranked = run
        return f"CV {cv}, {'with' if ranked else 'without'} priorities"

    plan = [(cv, ranked) for cv in bursts for ranked in (False, True)]
    found = play_all(plan, lambda run, part: _played(*run, scale, part), name, tell)
    return report_64([PriorityRun(*run) for run in zip(bursts, found[::2], found[1::2], strict=True)])


def report_64(runs: Sequence[PriorityRun]) -> Report:
    gains = [run.plain.urgent.request / run.ranked.urgent.request for run in runs]
    losses = [run.ranked.others.request / run.plain.others.request - 1 for run in runs]
    return Report(
        name="section 6.4",
        title=f"priorities: S-S, {RATE:g} req/s in bursts, {URGENT:.0%} urgent",
        cells=tuple(cell for run in runs for cell in _priority_cells(run)),
        claims=(
            Claim(
                said=f"urgent requests are {FASTER}× as fast at the highest CV, or faster",
                holds=gains[-1] >= FASTER,
                found=f"{gains[-1]:.2f}× at CV {runs[-1].burst}; {min(gains):.2f}× at the least, "
                f"{max(gains):.2f}× at the most",
            ),
            Claim(
                said=f"the others are slower by {SLOWER:.0%} at the most",
                holds=max(losses) <= SLOWER,
                found=f"by {max(losses):.1%} at the most",
            ),
        ),
        grids=(
            Grid(
                title="seconds",
                heads=("CV", "requests", "priorities", *_PRIORITY_COLUMNS),
                rows=tuple(row for run in runs for row in _priority_rows(run)),
            ),
        ),
    )


def _priority_cells(run: PriorityRun) -> Iterator[Cell]:
    old, new = PAPER[run.burst]
    ours = zip(run.plain.urgent, run.ranked.urgent, strict=True)
    for column, paper, (before, now) in zip(_PRIORITY_COLUMNS, zip(old, new, strict=True), ours, strict=True):
        yield from cells(
            f"CV {run.burst}, urgent", (f"{column}: times as fast", paper[0] / paper[1], before / now)
        )


def _priority_rows(run: PriorityRun) -> Iterator[tuple[str, ...]]:
    for known, found, paper in zip(("no", "yes"), (run.plain, run.ranked), PAPER[run.burst], strict=True):
        for who, some in (
            ("urgent, in the paper", paper),
            ("urgent", found.urgent),
            ("others", found.others),
        ):
            request, prefill, p99, decode = some
            shown = f"{request:.2f}", f"{prefill:.3f}", f"{p99:.2f}", f"{decode:.4f}"
            yield (str(run.burst), who, known, *shown)


def _played(cv: int, ranked: bool, scale: Scale, tell: TellPart) -> Found:
    """Plays the requests. `ranked` tells whether anybody knows what is urgent."""
    instances, count = SIZES[scale]
    bursts = replace(SHORT, gaps=gamma(cv), urgent=URGENT)
    asked = list(bursts.requests(RATE * instances / INSTANCES, count))
    played = asked if ranked else [structs.replace(request, priority=0) for request in asked]
    units = units_of(OWN, instances, LEVELS if ranked else ())
    results = play_point(OWN, units, played, tell_each(tell, count)).results
    return told_apart(results, [one for one, request in zip(played, asked, strict=True) if request.priority])


def told_apart(results: Sequence[RequestResult], urgent: Sequence[WorkloadRequest]) -> Found:
    """Returns the times of urgent requests and of the others. `urgent` are requests of the results, these
    very ones, because in a burst others come at the same time."""
    known = {id(request) for request in urgent}
    first, others = ([one for one in results if (id(one.request) in known) is own] for own in (True, False))
    return Found(Seconds.of(first), Seconds.of(others))
