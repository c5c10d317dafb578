"""Some requests are more urgent than others (section 6.4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Final, NamedTuple

from msgspec import structs

from kvloom.reproduce.llumnix.point import LLUMNIX, latencies, play_outcomes
from kvloom.reproduce.llumnix.setup import INSTANCES, POOL, SHORT, SIZES, make_units
from kvloom.reproduce.report import Cell, Claim, Grid, Report, Scale, Tell, part_of
from kvloom.types.request import Level
from kvloom.workload.arrivals import gamma
from kvloom.workload.ask import Ask, Outcome

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
_COLUMNS: Final = ("mean", "mean prefill", "P99 prefill", "mean decode")


class Seconds(NamedTuple):
    """Means of whole requests, to the first token, its P99, and between tokens."""

    request: float
    prefill: float
    prefill_p99: float
    decode: float

    @staticmethod
    def of(outcomes: Sequence[Outcome]) -> Seconds:
        prefill, decode, request = latencies(outcomes)
        return Seconds(request.mean, prefill.mean, prefill.p99, decode.mean)


@dataclass(frozen=True, slots=True)
class Found:
    urgent: Seconds
    others: Seconds


@dataclass(frozen=True, slots=True)
class Run:
    """plain: where nobody knows what is urgent."""

    burst: int
    plain: Found
    ranked: Found


def section_64(scale: Scale, tell: Tell) -> Report:
    """S-S in bursts; a tenth of the requests is urgent."""
    bursts = BURSTS if scale == "full" else BURSTS[1:2]
    runs = []
    for at, cv in enumerate(bursts):
        plain, ranked = (_played(cv, known, scale, part_of(tell, at, len(bursts))) for known in (False, True))
        runs.append(Run(cv, plain, ranked))
    return report_of(runs)


def report_of(runs: Sequence[Run]) -> Report:
    gains = [run.plain.urgent.request / run.ranked.urgent.request for run in runs]
    losses = [run.ranked.others.request / run.plain.others.request - 1 for run in runs]
    return Report(
        name="section 6.4",
        title=f"priorities: S-S, {RATE:g} req/s in bursts, {URGENT:.0%} urgent",
        cells=tuple(cell for run in runs for cell in _cells(run)),
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
                heads=("CV", "requests", "priorities", *_COLUMNS),
                rows=tuple(row for run in runs for row in _rows(run)),
            ),
        ),
    )


def _cells(run: Run) -> Iterator[Cell]:
    old, new = PAPER[run.burst]
    ours = zip(run.plain.urgent, run.ranked.urgent, strict=True)
    for column, paper, (before, now) in zip(_COLUMNS, zip(old, new, strict=True), ours, strict=True):
        row = f"CV {run.burst}, urgent"
        yield Cell(row=row, column=f"{column}: times as fast", paper=paper[0] / paper[1], ours=before / now)


def _rows(run: Run) -> Iterator[tuple[str, ...]]:
    for known, found, paper in zip(("no", "yes"), (run.plain, run.ranked), PAPER[run.burst], strict=True):
        for who, some in (
            ("urgent, in the paper", paper),
            ("urgent", found.urgent),
            ("others", found.others),
        ):
            request, prefill, p99, decode = some
            shown = f"{request:.2f}", f"{prefill:.3f}", f"{p99:.2f}", f"{decode:.4f}"
            yield (str(run.burst), who, known, *shown)


def _played(cv: float, ranked: bool, scale: Scale, tell: Tell) -> Found:
    """ranked: whether anybody knows what is urgent."""
    instances, requests = SIZES[scale]
    asked = list(replace(SHORT, gaps=gamma(cv), urgent=URGENT).asks(RATE * instances / INSTANCES, requests))
    over = count(1)

    def told(_: Outcome) -> None:
        tell(f"CV {cv:g}, {'with' if ranked else 'without'} priorities", (ranked + next(over) / requests) / 2)

    played = asked if ranked else [_plain(ask) for ask in asked]
    outcomes = play_outcomes(LLUMNIX, make_units(instances, LEVELS if ranked else ()), played, told)
    return told_apart(outcomes, [one for one, ask in zip(played, asked, strict=True) if ask.priority])


def told_apart(outcomes: Sequence[Outcome], urgent: Sequence[Ask]) -> Found:
    """urgent: asks of the outcomes, these very ones: in a burst others come at the same time."""
    known = {id(ask) for ask in urgent}
    first, others = ([one for one in outcomes if (id(one.ask) in known) is own] for own in (True, False))
    return Found(Seconds.of(first), Seconds.of(others))


def _plain(ask: Ask) -> Ask:
    return structs.replace(ask, priority=0)
