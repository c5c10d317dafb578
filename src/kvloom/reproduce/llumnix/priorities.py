"""Some requests are more urgent than others (section 6.4)."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Final

from msgspec import structs

from kvloom.core.priority import Level
from kvloom.reproduce.llumnix.point import LLUMNIX, Times, latencies, play_outcomes
from kvloom.reproduce.llumnix.setup import INSTANCES, POOL, SHORT, SIZES, make_units
from kvloom.reproduce.report import Cell, Claim, Report, Scale, Tell
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

Found = tuple[Times, Times, Times]  # to the first token, between tokens, to the last


def section_64(scale: Scale, tell: Tell) -> Report:
    """S-S in bursts; a tenth of the requests is urgent."""
    bursts = BURSTS if scale == "full" else BURSTS[1:2]
    cells, gains, losses = list[Cell](), list[float](), list[float]()
    for at, cv in enumerate(bursts):
        part = _part(tell, at, len(bursts))
        plain, urgent = (_played(cv, ranked, scale, part) for ranked in (False, True))
        for column, i in zip(_COLUMNS, range(4), strict=True):
            before, now = (_numbers(found[0])[i] for found in (plain, urgent))
            old, new = (PAPER[cv][side][i] for side in range(2))
            cells.append(
                Cell(
                    row=f"CV {cv}, urgent",
                    column=f"{column}: times as fast",
                    paper=old / new,
                    ours=before / now,
                )
            )
        gains.append(plain[0][2].mean / urgent[0][2].mean)
        losses.append(urgent[1][2].mean / plain[1][2].mean - 1)
    return Report(
        name="section 6.4",
        title=f"priorities: S-S, {RATE:g} req/s in bursts, {URGENT:.0%} urgent",
        cells=tuple(cells),
        claims=(
            Claim(
                said=f"urgent requests are up to {FASTER}× as fast, or faster",
                holds=max(gains) >= FASTER,
                found=f"{min(gains):.2f}× to {max(gains):.2f}×",
            ),
            Claim(
                said=f"the others are slower by {SLOWER:.0%} at the most",
                holds=max(losses) <= SLOWER,
                found=f"by {max(losses):.1%} at the most",
            ),
        ),
    )


def _part(tell: Tell, at: int, of: int) -> Tell:
    return lambda what, part: tell(what, (at + part) / of)


def _played(cv: float, ranked: bool, scale: Scale, tell: Tell) -> tuple[Found, Found]:
    """The urgent requests, and the others. ranked: whether anybody knows."""
    instances, requests = SIZES[scale]
    asked = list(replace(SHORT, gaps=gamma(cv), urgent=URGENT).asks(RATE * instances / INSTANCES, requests))
    over = count(1)

    def told(_: Outcome) -> None:
        tell(f"CV {cv:g}, {'with' if ranked else 'without'} priorities", (ranked + next(over) / requests) / 2)

    played = asked if ranked else [_plain(ask) for ask in asked]
    urgent = {
        id(one) for one, ask in zip(played, asked, strict=True) if ask.priority
    }  # many come at one time
    outcomes = play_outcomes(LLUMNIX, make_units(instances, LEVELS if ranked else ()), played, told)
    of_both = [[one for one in outcomes if (id(one.ask) in urgent) is first] for first in (True, False)]
    return latencies(of_both[0]), latencies(of_both[1])


def _plain(ask: Ask) -> Ask:
    return structs.replace(ask, priority=0)


def _numbers(found: Found) -> tuple[float, float, float, float]:
    prefill, decode, request = found
    return request.mean, prefill.mean, prefill.p99, decode.mean
