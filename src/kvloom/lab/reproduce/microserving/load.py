"""Patterns under load (LLM Microserving, sections 4.1 and 4.3): figures 10, 11 and 13."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from operator import attrgetter
from typing import Final

from kvloom.lab.reproduce.microserving.setup import (
    DATA_PARALLEL,
    ONE_ONE,
    ONE_ONE_BALANCE,
    ONE_TWO,
    REQUESTS,
    SHAREGPT,
    Pattern,
    Point,
    balance,
    run_point,
    synthetic,
)
from kvloom.lab.reproduce.report import Cell, Claim, Grid, Report, Scale, Tell, duration, part_of
from kvloom.lab.reproduce.setup import TellPart, play_all, tell_each
from kvloom.lab.workload.lengths import Sides

# Requests a second for each GPU. The paper's text tells 2.5 of figure 11; the others are ours.
SHAREGPT_RATES: Final = (2.0, 4.0, 6.0, 8.0)
RATES_3000: Final = (1.0, 1.5, 2.0, 2.5)
RATES_5000: Final = (0.5, 0.75, 1.0, 1.25, 1.5)
RATIOS: Final = (0.1, 0.2, 0.3)
PATTERNS: Final = (DATA_PARALLEL, ONE_ONE, ONE_ONE_BALANCE, ONE_TWO)

BEST_MEAN: Final = 21.0  # per cent by which disaggregation shortens the job completion time at best
BEST_P99: Final = 47.0
BEST_RATIO: Final = 1.19  # times that ratio 0.1 is faster than higher ones, P99, at 3,000 tokens at best

EQUAL: Final = 0.02  # of it two latencies count as equal

_HEADS: Final = ("req/s a GPU", "pattern", "TTFT", "TTFT P99", "TPOT", "TPOT P99", "JCT", "JCT P99")

Measure = Callable[[Point], float]
ttft: Final[Measure] = attrgetter("first.mean")
tpot: Final[Measure] = attrgetter("per_token.mean")
jct: Final[Measure] = attrgetter("end.mean")
jct_p99: Final[Measure] = attrgetter("end.p99")

Points = Mapping[tuple[float, str], Point]  # by rate and pattern


def sweep(
    patterns: Sequence[Pattern], lengths: Sides, rates: Sequence[float], requests: int, tell: Tell
) -> Points:
    """Plays each pattern at each rate."""

    def play(run: tuple[float, Pattern], part: TellPart) -> Point:
        rate, pattern = run
        return run_point(pattern, lengths, rate, requests, tell_each(part, requests))

    plan = list(product(rates, patterns))
    points = play_all(plan, play, lambda run: f"{run[1].name}, {run[0]:g} req/s a GPU", tell)
    return {(rate, pattern.name): point for (rate, pattern), point in zip(plan, points, strict=True)}


def figure_10(scale: Scale, tell: Tell) -> Report:
    """Plays ShareGPT."""
    rates = SHAREGPT_RATES if scale == "full" else (6.0,)
    points = sweep(PATTERNS, SHAREGPT, rates, REQUESTS[scale], tell)
    disaggregated = [(DATA_PARALLEL, other, jct) for other in PATTERNS[1:]]
    claims = (
        ("disaggregation does not better data parallelism's JCT", disaggregated),
        ("1P1D has a shorter JCT than 1P1D-balance", [(ONE_ONE, ONE_ONE_BALANCE, jct)]),
        ("1P2D has a lower TPOT and JCT than 1P1D", [(ONE_TWO, ONE_ONE, jct), (ONE_TWO, ONE_ONE, tpot)]),
    )
    return Report(
        name="figure 10",
        title="ShareGPT: short prompts, answers as long",
        claims=tuple(_no_worse(said, points, rates, pairs) for said, pairs in claims),
        grids=(_grid(points),),
    )


def figure_11(scale: Scale, tell: Tell) -> Report:
    """Plays prompts of 3,000 tokens and outputs of 100."""
    rates = RATES_3000 if scale == "full" else (2.0, 2.5)
    points = sweep(PATTERNS, synthetic(3000), rates, REQUESTS[scale], tell)
    one, even = points[rates[-1], ONE_ONE.name], points[rates[-1], ONE_ONE_BALANCE.name]
    rivals = (ONE_ONE, ONE_ONE_BALANCE)
    lower = [(rival, DATA_PARALLEL, tpot) for rival in rivals]
    return Report(
        name="figure 11",
        title="3,000 tokens in, 100 out",
        cells=(
            _gain("mean", BEST_MEAN, jct, points, rates, rivals),
            _gain("P99", BEST_P99, jct_p99, points, rates, rivals),
        ),
        claims=(
            _no_worse("disaggregation has a lower TPOT than data parallelism", points, rates, lower),
            Claim(
                said=f"at {rates[-1]:g} req/s a GPU 1P1D suffers by its TTFT, 1P1D-balance keeps the JCT low",
                holds=jct(even) < jct(one) and ttft(even) < ttft(one),
                found=f"TTFT {ttft(one):.2g} s against {ttft(even):.2g} s, "
                f"JCT {jct(one):.2g} s against {jct(even):.2g} s",
            ),
        ),
        grids=(_grid(points),),
    )


def figure_13(scale: Scale, tell: Tell) -> Report:
    """Finds how much of a prompt the decoder should compute."""
    ratios, requests = [balance(ratio) for ratio in RATIOS], REQUESTS[scale]
    short_rates, long_rates = (RATES_3000, RATES_5000) if scale == "full" else ((2.0,), (1.5,))
    short = sweep(ratios, synthetic(3000), short_rates, requests, part_of(tell, 0, 2))
    long = sweep(ratios, synthetic(5000), long_rates, requests, part_of(tell, 1, 2))
    top = long_rates[-1]
    best = min(ratios, key=lambda pattern: jct_p99(long[top, pattern.name]))
    quicker = [(ratios[i + 1], ratios[i], ttft) for i in range(len(ratios) - 1)]
    return Report(
        name="figure 13",
        title="the balance ratio at 3,000 and 5,000 tokens in",
        cells=(_lowest_ratio(short, short_rates, ratios),),
        claims=(
            Claim(
                said="at 5,000 tokens and a high rate a higher ratio than 0.1 is better",
                holds=best is not ratios[0],
                found=f"{best.name} has the shortest P99 JCT at {top:g} req/s a GPU",
            ),
            _no_worse("there a higher ratio has a shorter TTFT", long, (top,), quicker),
        ),
        grids=(_grid(short, "3,000 tokens: "), _grid(long, "5,000 tokens: ")),
    )


def _lowest_ratio(points: Points, rates: Sequence[float], ratios: Sequence[Pattern]) -> Cell:
    """Returns how much faster the lowest ratio is than a higher one at best."""
    gains = [
        (jct_p99(points[rate, higher.name]) / jct_p99(points[rate, ratios[0].name]), rate, higher.name)
        for rate in rates
        for higher in ratios[1:]
    ]
    gain, rate, name = max(gains)
    return Cell(
        row=f"P99 JCT at 3,000 tokens, {ratios[0].name} against {name} at {rate:g} req/s",
        column="times faster at best",
        paper=BEST_RATIO,
        ours=gain,
    )


def _gain(
    what: str,
    paper: float,
    of: Measure,
    points: Points,
    rates: Sequence[float],
    patterns: Sequence[Pattern],
) -> Cell:
    """Returns by how much the better of `patterns` shortens it at best, against data parallelism."""
    gains = [
        (1 - of(points[rate, pattern.name]) / of(points[rate, DATA_PARALLEL.name]), rate, pattern.name)
        for rate in rates
        for pattern in patterns
    ]
    gain, rate, name = max(gains)
    return Cell(
        row=f"{what} JCT, {name} at {rate:g} req/s", column="shorter at best, %", paper=paper, ours=gain * 100
    )


def _no_worse(
    said: str,
    points: Points,
    rates: Sequence[float],
    pairs: Sequence[tuple[Pattern, Pattern, Measure]],
) -> Claim:
    """Returns whether the first of each pair has the smaller number, or nearly so, at every rate."""
    found = [
        (of(points[rate, worse.name]) / of(points[rate, better.name]), rate, worse.name)
        for rate in rates
        for better, worse, of in pairs
    ]
    least, most = min(found), max(found)
    return Claim(
        said=said,
        holds=least[0] >= 1 - EQUAL,
        found=f"{least[0]:.2f}× at the least ({least[2]}, {least[1]:g} req/s), {most[0]:.2f}× at the most",
    )


def _grid(points: Points, what: str = "") -> Grid:
    rows = tuple(
        (
            f"{rate:g}",
            name,
            *(
                duration(seconds)
                for latency in (point.first, point.per_token, point.end)
                for seconds in (latency.mean, latency.p99)
            ),
        )
        for (rate, name), point in points.items()
    )
    return Grid(title=f"{what}ours, means and P99", heads=_HEADS, rows=rows)
