"""Whole systems on 32 GPUs (MuxServe, sections 4.2 and 4.3): figures 5 and 7."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from kvloom.lab.reproduce.muxserve.points import SCALES, Point, play_points
from kvloom.lab.reproduce.muxserve.setup import (
    CHATLMSYS,
    SECONDS,
    Load,
    Served,
    falling,
)
from kvloom.lab.reproduce.muxserve.systems import CHAT_PARTS, KVLOOM, MUXSERVE, SPATIAL, TEMPORAL, Apart
from kvloom.lab.reproduce.report import (
    Cell,
    Claim,
    Grid,
    Report,
    Scale,
    Tell,
    cells,
    duration,
    part_of,
)

GPUS: Final = 32
SYSTEMS: Final = (SPATIAL, TEMPORAL, MUXSERVE)  # as published; kvloom stands beside them
SYNTHETIC: Final = ("7b",) * 12 + ("13b",) * 4 + ("30b",) * 2 + ("65b",)
CHAT: Final = (
    "13b", "13b", "13b", "7b", "13b", "13b", "7b", "30b",
    "30b", "65b", "30b", "13b", "7b", "65b", "7b", "65b",
)  # fmt: skip
TOP: Final = 20.0  # requests a second of the most popular model at rate scale 1
POINTS: Final[Mapping[Scale, Sequence[tuple[str, float]]]] = {
    "full": (("0.7", 1.0), ("1.3", 1.0), ("2.1", 1.0), ("2.1", 1.5), ("2.1", 2.5)),
    "small": (("2.1", 1.0),),
}
"""The points of figure 5 that are played: α, and the factors of the rates."""
# Figure 5, by α and then by rate scale, under each of SYSTEMS: the sum of whole rates times throughputs
# over 19, as the paper plots it; None if the logs published with it are incomplete
FIGURE_5: Final[Mapping[str, Mapping[float, tuple[float | None, ...]]]] = {
    "0.7": {
        1.0: (31.3, 29.8, 40.1), 1.5: (56.3, 67.8, 86.5),
        2.0: (82.2, 110.6, 130.3), 2.5: (105.3, 141.3, 153.5),
    },
    "0.9": {
        1.0: (20.9, None, 30.0), 1.5: (38.5, None, 63.3), 2.0: (57.9, None, 103.9), 2.5: (75.3, None, 138.3),
    },
    "1.3": {
        1.0: (14.4, 20.2, 22.7), 1.5: (23.7, 27.8, 42.2), 2.0: (33.9, 42.2, 67.3), 2.5: (44.5, 64.5, 108.4),
    },
    "1.7": {
        1.0: (11.3, 15.7, 22.4), 1.5: (19.6, 25.3, 40.7), 2.0: (26.0, 34.9, 57.9), 2.5: (34.4, 42.6, 73.4),
    },
    "2.1": {
        1.0: (10.7, 16.0, 20.0), 1.5: (15.3, 23.7, 36.7), 2.0: (22.2, 34.3, 53.7), 2.5: (29.6, 41.7, 73.1),
    },
}  # fmt: skip
# Percent of the requests in time at rate scale 1, by α and under each of SYSTEMS, for each of SCALES
ATTAINED: Final = {
    "0.7": ((72, 75, 76, 81), (13, 22, 26, 56), (71, 78, 84, 96)),
    "2.1": ((30, 35, 37, 44), (11, 29, 41, 64), (71, 100, 100, 100)),
}

# Figure 7: throughput weighted with rates, by the average rate, under each of SYSTEMS; and each model's rate
FIGURE_7: Final[Mapping[float, tuple[float, ...]]] = {
    3.0: (3.87, 3.51, 4.2),
    4.8: (4.64, 2.73, 5.38),
    7.1: (5.07, 4.7, 6.32),
    9.5: (5.36, 5.19, 7.59),
    11.9: (5.67, 5.36, 7.84),
}
CONDENSED: Final[Mapping[float, float]] = {3.0: 500, 4.8: 800, 7.1: 1200, 9.5: 1600, 11.9: 2000}
"""The factor by which half a day of requests was condensed for each rate. All rates have the same
requests."""
HALF_A_DAY: Final = 43_200.0  # seconds
LOADS: Final[Mapping[Scale, Sequence[float]]] = {"full": (3.0, 7.1, 11.9), "small": (11.9,)}
CHAT_RATES: Final = (
    19.53, 2.81, 17.0, 19.56, 2.64, 4.44, 2.36, 4.92, 1.83, 1.92, 14.83, 4.56, 4.69, 2.11, 7.58, 3.25,
)  # fmt: skip
_CONDENSED: Final = 1200.0  # with CHAT_RATES
CHAT_TOKENS: Final = (384, 245, 209, 429, 240, 250, 302, 268, 253, 329, 443, 308, 281, 359, 288, 321)
"""The mean tokens of each model's requests, by the results that were published."""
CHAT_SPATIAL: Final = replace(
    SPATIAL,
    place=Apart({"7b": 1, "13b": 2, "30b": 2, "65b": 4}, {"1-13b": 1, "3-13b": 1}),
    pools=CHAT_PARTS,
)
"""The spatial partitioning of figure 7, in which the two most popular 13B have one GPU each, and the other
ones two."""
_SLACK: Final = 0.05  # by which what grows may fall from one point to the next
_SLO: Final = 8


@dataclass(frozen=True, slots=True)
class Row:
    """The throughput of each system under one load, in the paper (None if it has none) and here."""

    name: str
    paper: Sequence[float | None]
    ours: Sequence[float]
    points: Sequence[Point]

    def cells(self) -> list[Cell]:
        """Returns the throughputs, and MuxServe's over each of the others."""
        names = [system.name for system in SYSTEMS]
        leads = [
            (f"MuxServe over {name}", _over(self.paper, at), _over(self.ours, at) or 0.0)
            for at, name in enumerate(names[:-1])
        ]
        own = [
            ("kvloom", None, self.ours[_OWN]),
            ("kvloom over MuxServe", None, self.ours[_OWN] / self.muxserve),
        ]
        return cells(self.name, *zip(names, self.paper, self.ours, strict=False), *leads, *own)

    @property
    def muxserve(self) -> float:
        return self.ours[_MUXSERVE]

    @property
    def best(self) -> float:
        """Returns MuxServe's throughput over that of the better one of the others."""
        return self.muxserve / max(self.ours[:_MUXSERVE])


_MUXSERVE: Final = len(SYSTEMS) - 1
_OWN: Final = len(SYSTEMS)


def _over(throughput: Sequence[float | None], at: int) -> float | None:
    most, other = throughput[_MUXSERVE], throughput[at]
    return most / other if most and other else None


def plotted(models: Sequence[Served], point: Point) -> float:
    """Returns what figure 5 plots."""
    return sum(int(model.rate) * point.throughput[model.name] for model in models) / len(models)


def figure_5(scale: Scale, tell: Tell) -> Report:
    """Plays synthetic loads: 19 LLMs, whose rates fall by a power law."""
    rows: dict[tuple[str, float], Row] = {}
    for n, (alpha, factor) in enumerate(POINTS[scale]):
        load = Load(falling(SYNTHETIC, float(alpha), TOP * factor), GPUS, SECONDS[scale])
        part = part_of(tell, n, len(POINTS[scale]))
        points = play_points([(system, load) for system in (*SYSTEMS, KVLOOM)], part)
        ours = [plotted(load.models, point) for point in points]
        rows[alpha, factor] = Row(f"α {alpha}, rates × {factor:g}", FIGURE_5[alpha][factor], ours, points)
    gains = {alpha: _over(row.ours, 0) or 0.0 for (alpha, factor), row in rows.items() if factor == 1.0}
    paper = max(_best(FIGURE_5[alpha][factor]) for alpha, factor in rows)
    best = max(rows.values(), key=lambda row: row.best)
    return Report(
        name="figure 5",
        title="19 LLMs on 32 GPUs: Σ ⌊rate⌋ · throughput / 19, and requests in time",
        cells=(*(cell for row in rows.values() for cell in row.cells()), *_in_time(rows)),
        claims=(
            _most([*rows.values()]),
            _own([*rows.values()]),
            _grows("the gain over spatial partitioning grows with α", gains),
            Claim(
                said=f"up to 1.8× the throughput of the others; at these points up to {paper:.2f}×",
                holds=best.best >= paper * (1 - _SLACK),
                found=f"up to {best.best:.2f}× that of the better one ({best.name})",
            ),
        ),
        grids=(_tails([*rows.values()]),),
    )


def _best(throughput: Sequence[float | None]) -> float:
    """Returns MuxServe's throughput over that of the better other, in the paper; 0 if it has not both."""
    spatial, temporal, most = throughput
    return most / max(spatial, temporal) if spatial and temporal and most else 0.0


def _tails(rows: Sequence[Row]) -> Grid:
    """Returns the tails that the paper's appendix draws, and answers a second while requests come."""
    return Grid(
        title="P99 to the first token, between tokens and to the last one; and req/s that ended in the "
        "second half of the time in which requests come",
        heads=("", "system", "TTFT P99", "TPOT P99", "latency P99", "req/s"),
        rows=tuple(
            (row.name, system.name, *map(duration, point.tails), f"{sum(point.answered.values()):.1f}")
            for row in rows
            for system, point in zip((*SYSTEMS, KVLOOM), row.points, strict=True)
        ),
    )


def _in_time(rows: Mapping[tuple[str, float], Row]) -> list[Cell]:
    return [
        Cell(
            row=f"α {alpha}, {system.name}",
            column=f"% within {scale}× of alone",
            paper=float(percent),
            ours=100 * point.attained[scale],
        )
        for alpha, told in ATTAINED.items()
        if (alpha, 1.0) in rows
        for system, percents, point in zip(SYSTEMS, told, rows[alpha, 1.0].points, strict=False)
        for scale, percent in zip(SCALES, percents, strict=True)
    ]


def _most(rows: Sequence[Row]) -> Claim:
    least = min(rows, key=lambda row: row.best)
    return Claim(
        said="MuxServe has the highest throughput at every point",
        holds=least.best >= 1.0,
        found=f"{least.best:.2f}× the better other at the least ({least.name})",
    )


def _own(rows: Sequence[Row]) -> Claim:
    least = min(rows, key=lambda row: row.ours[_OWN] / row.muxserve)
    return Claim(
        said="(not the paper's) kvloom as it is has at least the throughput of MuxServe as published",
        holds=least.ours[_OWN] >= least.muxserve,
        found=f"{least.ours[_OWN] / least.muxserve:.2f}× at the least ({least.name})",
    )


def _grows(said: str, values: Mapping[str, float]) -> Claim:
    found = [*values.values()]
    rises = all(later >= (1 - _SLACK) * earlier for earlier, later in pairwise(found))
    told = ", ".join(f"{value:.2f}× at {key}" for key, value in values.items())
    return Claim(said=said, holds=rises and found[-1] >= found[0], found=told)


def chat(average: float) -> Load:
    """Returns the load of figure 7 at an average rate: half a day of ChatLMSYS, condensed."""
    seconds = HALF_A_DAY / CONDENSED[average]
    whole = CHATLMSYS.mean_prompt + CHATLMSYS.mean_output
    models = tuple(
        Served(
            f"{n}-{size}",
            size,
            rate * CONDENSED[average] / _CONDENSED,
            CHATLMSYS.scaled(CHATLMSYS.mean_prompt * tokens / whole, CHATLMSYS.mean_output * tokens / whole),
        )
        for n, (size, rate, tokens) in enumerate(zip(CHAT, CHAT_RATES, CHAT_TOKENS, strict=True), 1)
    )
    return Load(models, GPUS, seconds, counted=True)


def figure_7(scale: Scale, tell: Tell) -> Report:
    """Plays ChatLMSYS: 16 LLMs, whose rates are those of real traffic."""
    rows = []
    for n, average in enumerate(LOADS[scale]):
        load = chat(average)
        if scale == "small":
            load = replace(load, seconds=load.seconds / 8)
        systems = (CHAT_SPATIAL, TEMPORAL, MUXSERVE, KVLOOM)
        points = play_points([(system, load) for system in systems], part_of(tell, n, len(LOADS[scale])))
        ours = [point.weighted(load.models) for point in points]
        rows.append(Row(f"{average:g} req/s a model", FIGURE_7[average], ours, points))
    return Report(
        name="figure 7",
        title="16 LLMs of ChatLMSYS on 32 GPUs: throughput weighted with rates",
        cells=tuple(cell for row in rows for cell in row.cells()),
        claims=(_most(rows), _own(rows), _sooner(rows)),
        grids=(_tails(rows),),
    )


def _sooner(rows: Sequence[Row]) -> Claim:
    shares = [[point.attained[_SLO] for point in row.points[: len(SYSTEMS)]] for row in rows]
    told = "; ".join(" / ".join(f"{share:.0%}" for share in each) for each in shares)
    return Claim(
        said=f"MuxServe has the most requests within {_SLO}× of what they take alone, at every rate",
        holds=all(each[-1] >= max(each) for each in shares),
        found=f"spatial / temporal / MuxServe: {told}",
    )


STEPS: Final[Mapping[Scale, Sequence[float]]] = {
    "full": (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0),
    "small": (0.05, 4.0),
}
"""The factors of the rates of figure 5 at which section 4.2's claim is looked for."""
_MORE: Final = 2.9  # times the requests
_ATTAINED: Final = 0.99


def section_4_2(scale: Scale, tell: Tell) -> Report:
    """Finds the highest rates at which 99 % of the requests are in time. The paper tells neither α nor the
    scale of the SLO: here they are 2.1 and each of SCALES."""
    systems = (*SYSTEMS, KVLOOM)
    steps = STEPS[scale]
    most: dict[str, dict[int, float]] = {system.name: dict.fromkeys(SCALES, 0.0) for system in systems}
    for n, system in enumerate(systems):
        going = set(SCALES)
        for at, factor in enumerate(steps):
            load = Load(falling(SYNTHETIC, 2.1, TOP * factor), GPUS, SECONDS[scale] / 6)
            (point,) = play_points(
                [(system, load)], part_of(tell, n * len(steps) + at, len(systems) * len(steps))
            )
            going = {slo for slo in going if point.attained[slo] >= _ATTAINED}
            for slo in going:
                most[system.name][slo] = factor
            if not going:
                break
    muxserve = most[MUXSERVE.name]
    leads = [
        muxserve[slo] / max(most[SPATIAL.name][slo], most[TEMPORAL.name][slo])
        for slo in SCALES
        if max(most[SPATIAL.name][slo], most[TEMPORAL.name][slo])
    ]
    above = any(
        muxserve[slo] and not max(most[SPATIAL.name][slo], most[TEMPORAL.name][slo]) for slo in SCALES
    )
    found = f"up to {max(leads, default=0.0):.2f}× the better of the others" + (
        "; at some scales the others have none at any of these rates" if above else ""
    )
    return Report(
        name="section 4.2",
        title="times the rates of α 2.1 at which 99 % of the requests are in time",
        claims=(
            Claim(
                said=f"up to {_MORE}× the requests within 99 % SLO attainment",
                holds=True if max(leads, default=0.0) >= _MORE * (1 - _SLACK) else None if above else False,
                found=found,
            ),
        ),
        grids=(
            Grid(
                title="The highest of " + ", ".join(f"{factor:g}" for factor in steps),
                heads=("system", *(f"within {slo}× of alone" for slo in SCALES)),
                rows=tuple(
                    (name, *(f"{factor:g}" if factor else "none" for factor in by_slo.values()))
                    for name, by_slo in most.items()
                ),
            ),
        ),
    )
