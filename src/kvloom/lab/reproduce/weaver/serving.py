"""The throughput and the speed of the hot model on each platform and trace (section 5): figures 4 and 6."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvloom.lab.reproduce.report import Cell, Claim, Grid, Report, Scale, Tell, cells
from kvloom.lab.reproduce.weaver.setup import (
    AZURE,
    BARE_MUXSERVE,
    BARE_TEMPORAL,
    BURSTGPT,
    DEDICATED,
    LONG,
    MUXSERVE,
    TEMPORAL,
    WEAVER,
    Load,
    Point,
    System,
    Trace,
    play_points,
)

# What the paper tells in numbers: figure 4, Azure-Conv on A100
DEDICATED_MOST: Final = 15.0  # requests a second
WEAVER_MOST: Final = 22.0
DEDICATED_BATCH: Final = 118  # at DEDICATED_MOST
WEAVER_BATCH: Final = 231  # at WEAVER_MOST
FILLED: Final = {"dedicated": 88.9, "hot": 46.9, "lent": 36.7}  # % of a pool, all at DEDICATED_MOST

# figure 4, the best of its traces
OVER_DEDICATED: Final = 1.60
OVER_MUXSERVE: Final = {"A100-40": 1.22, "L40S": 1.77}
LOW_COLD: Final = 1.04  # times the cold model's time a token, at low rates
QUICKER: Final = 39.0  # % of the hot model's time a token, at the most, against dedicated at high rates
HIGH_COLD: Final = 5.0  # ms by which it is longer at high ones, at the most

LONG_OVER_MUXSERVE: Final = 1.42  # figure 6
LONG_COLD: Final = 8.0  # ms of the cold model, at the most
_FEW_SECONDS: Final = 12.0  # in small; no answer ends in them

SYSTEMS: Final[Mapping[str, tuple[System, ...]]] = {
    "A100-40": (DEDICATED, TEMPORAL, BARE_TEMPORAL, MUXSERVE, BARE_MUXSERVE, WEAVER),
    "L40S": (DEDICATED, TEMPORAL, BARE_TEMPORAL, WEAVER),  # without MPS, as in the paper
}
STEADY: Final[Mapping[str, tuple[System, ...]]] = {
    "A100-40": (DEDICATED, TEMPORAL, MUXSERVE, BARE_MUXSERVE, WEAVER),
    "L40S": (DEDICATED, TEMPORAL, BARE_TEMPORAL, WEAVER),
}
"""The systems whose time a token is found over the rates."""

_TOLD: Final = f"A100-40, {AZURE.name}"
FLOOD: Final[Mapping[str, float]] = {
    "A100-40": 28.0,
    "L40S": 20.0,
}  # requests a second: more than any answers
SECONDS: Final[Mapping[Scale, float]] = {"full": 36.0, "small": 6.0}
"""Seconds for which requests come if answers are as long as Azure's; the time is longer for longer answers,
up to AT_MOST."""

AT_MOST: Final = 100.0
_STEADY_PART: Final[Mapping[Scale, float]] = {"full": 2 / 3, "small": 1.0}
"""The part of that time for which requests come if all are answered: nothing has to fill up then."""

LOW: Final = 5.0  # requests a second, at which nothing is short
HIGH: Final = DEDICATED_MOST
RATES: Final = {"A100-40": (LOW, 10.0, HIGH, 20.0), "L40S": (4.0, 8.0, 12.0, 16.0)}
"""Rates below what all are asked at most; the paper's axes are not told."""
_SLIGHT: Final = 1.15  # times
_SLACK: Final = 0.05
_HEADS: Final = ("", "req/s", "system", "answered", "hot, ms", "P99", "cold, ms", "P99", "batch", "pools, %")


@dataclass(frozen=True, slots=True)
class Run:
    """A system's run. `rate` is the one asked for; None if it is more than can be answered."""

    system: System
    load: Load
    rate: float | None
    point: Point

    @property
    def where(self) -> str:
        return self.load.where


Plan = list[tuple[System, Load, float | None]]


def seconds_of(trace: Trace, scale: Scale) -> float:
    return min(AT_MOST, SECONDS[scale] * trace.output / AZURE.output)


def play_all(plan: Plan, tell: Tell) -> list[Run]:
    points = play_points([(system, load) for system, load, _ in plan], tell)
    return [Run(*one, point) for one, point in zip(plan, points, strict=True)]


def floods(device: str, trace: Trace, scale: Scale) -> Plan:
    """Returns a plan in which each system is asked for more than it can answer."""
    load = Load(device, trace, FLOOD[device], seconds_of(trace, scale))
    return [(system, load, None) for system in SYSTEMS[device]]


def _steady(
    device: str, trace: Trace, rates: Sequence[float], systems: Sequence[System], scale: Scale
) -> Plan:
    return [
        (system, Load(device, trace, rate, _STEADY_PART[scale] * seconds_of(trace, scale)), rate)
        for rate in rates
        for system in systems
    ]


def figure_4(scale: Scale, tell: Tell) -> Report:
    """Finds what each system answers at most, and how fast it is below that."""
    plan = Plan()
    if scale == "small":
        plan += floods("A100-40", AZURE, scale)
        plan += _steady("A100-40", AZURE, (LOW, HIGH), (DEDICATED, WEAVER), scale)
    else:
        for device, trace in ((device, trace) for device in SYSTEMS for trace in (BURSTGPT, AZURE)):
            plan += floods(device, trace, scale)
            plan += _steady(device, trace, RATES[device], STEADY[device], scale)
    runs = play_all(plan, tell)
    most = {(run.where, run.system.name): run for run in runs if run.rate is None}
    steady = {
        (run.rate, run.system.name): run.point for run in runs if run.rate is not None and run.where == _TOLD
    }
    return Report(
        name="figure 4",
        title="the hot model's throughput, and time a token, at 1 req/s of the cold model",
        cells=(*_azure(most, steady), *_best(most), *_pace_cells(runs)),
        claims=(*_orders(most), *_paces(steady)),
        grids=(Grid(title="All points", heads=_HEADS, rows=tuple(map(row, runs))),),
    )


def _pace_cells(runs: Sequence[Run]) -> list[Cell]:
    """The paper tells the best of its points for the hot model, and means for the cold one."""
    found = {(run.where, run.rate, run.system.name): run.point for run in runs}
    pairs = [
        (rate, found[where, rate, DEDICATED.name], woven)
        for (where, rate, name), woven in found.items()
        if name == WEAVER.name and rate is not None
    ]
    quicker = max(100 * (1 - woven.hot.tpot / alone.hot.tpot) for _, alone, woven in pairs)
    low = min(rate for rate, *_ in pairs)
    slower = [_slower(alone, woven) for rate, alone, woven in pairs if rate == low]
    return cells(
        "time a token, below that",
        ("hot, % shorter than dedicated, at the most", QUICKER, quicker),
        (f"cold, times as long at {low:g} req/s", LOW_COLD, min(slower)),
    )


def _azure(most: Mapping[tuple[str, str], Run], steady: Mapping[tuple[float, str], Point]) -> list[Cell]:
    where = _TOLD
    dedicated, weaver = (most[where, system.name].point for system in (DEDICATED, WEAVER))
    high, woven = steady[HIGH, DEDICATED.name], steady[HIGH, WEAVER.name]
    most_ratio, lent = weaver.hot.rate / dedicated.hot.rate, 100 * woven.filled.get("lent", 0.0)
    return [
        *cells(
            f"{where}, at most",
            ("dedicated, req/s", DEDICATED_MOST, dedicated.hot.rate),
            ("Weaver, req/s", WEAVER_MOST, weaver.hot.rate),
            ("Weaver over dedicated", WEAVER_MOST / DEDICATED_MOST, most_ratio),
            ("Weaver, batch", WEAVER_BATCH, weaver.hot.batch),
        ),
        *cells(
            f"{where}, {HIGH:g} req/s",
            ("dedicated, batch", DEDICATED_BATCH, high.hot.batch),
            ("Weaver, % of the hot pool", FILLED["hot"], 100 * woven.filled["hot"]),
            ("Weaver, % of the cold pool lent", FILLED["lent"], lent),
        ),
    ]


def ratio(most: Mapping[tuple[str, str], Run], where: str, over: System) -> float:
    return most[where, WEAVER.name].point.hot.rate / most[where, over.name].point.hot.rate


def _best(most: Mapping[tuple[str, str], Run]) -> list[Cell]:
    """The paper tells the best of its traces."""
    places = list(dict.fromkeys(where for where, _ in most))
    best = max(ratio(most, where, DEDICATED) for where in places)
    told = cells("the best case", ("Weaver over dedicated", OVER_DEDICATED, best))
    muxserve = (("A100-40", (MUXSERVE, BARE_MUXSERVE)), ("L40S", (TEMPORAL, BARE_TEMPORAL)))
    for device, systems in muxserve:
        here = [where for where in places if where.startswith(device)]
        for system in systems if here else ():
            found = max(ratio(most, where, system) for where in here)
            cell = f"Weaver over {system.name}", OVER_MUXSERVE[device], found
            told += cells(f"the best case, {device}", cell)
    return told


def _orders(most: Mapping[tuple[str, str], Run]) -> list[Claim]:
    claims = []
    for where in dict.fromkeys(where for where, _ in most):
        rates = {name: run.point.hot.rate for (at, name), run in most.items() if at == where}
        bare = {BARE_MUXSERVE.name, BARE_TEMPORAL.name}
        for runtime, left_out in (("with MuxServe's runtime", bare), ("whatever the runtime", set[str]())):
            among = {name: rate for name, rate in rates.items() if name not in left_out}
            claims.append(
                Claim(
                    said=f"{where}: Weaver answers most, {runtime}",
                    holds=max(among.values()) == among[WEAVER.name],
                    found=", ".join(f"{name} {rate:.1f}" for name, rate in among.items()) + " req/s",
                )
            )
    return claims


def _paces(steady: Mapping[tuple[float, str], Point]) -> list[Claim]:
    def pair(rate: float) -> tuple[Point, Point]:
        return steady[rate, DEDICATED.name], steady[rate, WEAVER.name]

    (alone, woven), (late, better) = pair(LOW), pair(HIGH)
    slower, more = woven.hot.tpot / alone.hot.tpot, 1e3 * (better.cold.tpot - late.cold.tpot)
    cold = _slower(alone, woven)
    quicker = 100 * (1 - better.hot.tpot / late.hot.tpot)
    return [
        Claim(
            said="at low rates the hot model's time a token is slightly longer than under dedicated",
            holds=1.0 <= slower <= _SLIGHT,
            found=f"{slower:.2f}× at {LOW:g} req/s",
        ),
        Claim(
            said="at high rates it is shorter, by up to 39 %",
            holds=quicker >= QUICKER * (1 - _SLACK),
            found=f"by {quicker:.0f} % at {HIGH:g} req/s",
        ),
        Claim(
            said="the cold model takes 1.04× as long at low rates",
            holds=cold <= LOW_COLD * (1 + _SLACK),
            found=f"{cold:.2f}×",
        ),
        Claim(
            said="and 3 to 5 ms longer at high ones, in the mean",
            holds=more <= HIGH_COLD,
            found=f"{more:.1f} ms at {HIGH:g} req/s",
        ),
    ]


def _slower(alone: Point, woven: Point) -> float:
    """Returns how many times as long the cold model takes for a token; 1 if it has made none alone."""
    return woven.cold.tpot / alone.cold.tpot if alone.cold.tpot else 1.0


def row(run: Run) -> tuple[str, ...]:
    hot, cold = run.point.hot, run.point.cold
    pools = " ".join(f"{name} {100 * part:.0f}" for name, part in run.point.filled.items())
    times = (
        f"{1e3 * seconds:.1f}" if seconds else "–"  # no answer has ended
        for seconds in (hot.tpot, hot.p99, cold.tpot, cold.p99)
    )
    asked = "more" if run.rate is None else f"{run.rate:g}"
    return (run.where, asked, run.system.name, f"{hot.rate:.1f}", *times, f"{hot.batch:.0f}", pools)


def figure_6(scale: Scale, tell: Tell) -> Report:
    """Plays longer answers: 512 tokens in, 1,024 out, on A100."""
    plan = floods("A100-40", LONG, scale)
    if scale == "small":
        few = (DEDICATED, MUXSERVE, BARE_MUXSERVE, WEAVER)
        plan = [
            (system, replace(load, seconds=_FEW_SECONDS), rate)
            for system, load, rate in plan
            if system in few
        ]
    runs = play_all(plan, tell)
    most = {(run.where, run.system.name): run for run in runs}
    where, cold = runs[0].where, {run.system.name: run.point.cold.tpot for run in runs}
    more = 1e3 * (cold[WEAVER.name] - cold[DEDICATED.name])
    return Report(
        name="figure 6",
        title="512 tokens in, 1,024 out",
        cells=tuple(
            cells(
                where,
                ("Weaver over MuxServe", LONG_OVER_MUXSERVE, ratio(most, where, MUXSERVE)),
                ("Weaver over MuxServe, bare", LONG_OVER_MUXSERVE, ratio(most, where, BARE_MUXSERVE)),
                ("cold, ms longer at the most", LONG_COLD, more),
            )
        ),
        claims=tuple(_orders(most)),
        grids=(Grid(title="All points", heads=_HEADS, rows=tuple(map(row, runs))),),
    )
