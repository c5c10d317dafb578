"""Whole systems on 32 GPUs (MuxServe, sections 4.2 and 4.3): figures 5 and 7."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Final

from kvloom.lab.reproduce.muxserve.setup import (
    CHATLMSYS,
    MUXSERVE,
    SCALES,
    SECONDS,
    SPATIAL,
    TEMPORAL,
    Load,
    Point,
    Served,
    falling,
    play_points,
    served,
)
from kvloom.lab.reproduce.report import Cell, Claim, Report, Scale, Tell, cells, part_of

GPUS: Final = 32
SYSTEMS: Final = (SPATIAL, TEMPORAL, MUXSERVE)
SYNTHETIC: Final = ("7b",) * 12 + ("13b",) * 4 + ("30b",) * 2 + ("65b",)
CHAT: Final = ("7b",) * 4 + ("13b",) * 6 + ("30b",) * 3 + ("65b",) * 3
TOP: Final = 20.0  # requests a second of the most popular model at rate scale 1
TIMES: Final[Mapping[Scale, Sequence[float]]] = {"full": (1.0, 2.0), "small": (1.0,)}  # of the rate
# Figure 5, by α and then by rate scale, under each of SYSTEMS: the sum of whole rates times throughputs
# over 19, as the paper plots it; None if the logs published with it are incomplete
FIGURE_5: Final[Mapping[str, Mapping[float, tuple[float | None, ...]]]] = {
    "0.7": {1.0: (31.3, 29.8, 40.1), 2.0: (82.2, 110.6, 130.3)},
    "0.9": {1.0: (20.9, None, 30.0), 2.0: (57.9, None, 103.9)},
    "1.3": {1.0: (14.4, 20.2, 22.7), 2.0: (33.9, 42.2, 67.3)},
    "1.7": {1.0: (11.3, 15.7, 22.4), 2.0: (26.0, 34.9, 57.9)},
    "2.1": {1.0: (10.7, 16.0, 20.0), 2.0: (22.2, 34.3, 53.7)},
}
# Percent of the requests in time at rate scale 1, by α and under each of SYSTEMS, for each of SCALES
ATTAINED: Final = {
    "0.7": ((72, 75, 76, 81), (13, 22, 26, 56), (71, 78, 84, 96)),
    "2.1": ((30, 35, 37, 44), (11, 29, 41, 64), (71, 100, 100, 100)),
}

# Figure 7: throughput weighted with rates, by the average rate, under each of SYSTEMS; and each model's rate
FIGURE_7: Final[Mapping[float, tuple[float, ...]]] = {
    3.0: (3.87, 3.51, 4.2),
    7.1: (5.07, 4.7, 6.32),
    11.9: (5.67, 5.36, 7.84),
}
CHAT_RATES: Final = (
    19.53, 2.81, 17.0, 19.56, 2.64, 4.44, 2.36, 4.92, 1.83, 1.92, 14.83, 4.56, 4.69, 2.11, 7.58, 3.25,
)  # fmt: skip
_AVERAGE: Final = 7.1  # requests a second and model with CHAT_RATES
_SLACK: Final = 0.05  # by which what grows may fall from one point to the next
_SLO: Final = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One load: the throughput by system, in the paper (None if it has none) and here."""

    name: str
    paper: Sequence[float | None]
    ours: Sequence[float]
    points: Sequence[Point]

    def cells(self) -> list[Cell]:
        """Throughputs, and MuxServe's over each of the others."""
        names = [system.name for system in SYSTEMS]
        leads = [
            (f"MuxServe over {name}", _over(self.paper, at), _over(self.ours, at) or 0.0)
            for at, name in enumerate(names[:-1])
        ]
        return cells(self.name, *zip(names, self.paper, self.ours, strict=True), *leads)

    @property
    def best(self) -> float:
        """MuxServe over the better one of the others."""
        return self.ours[-1] / max(self.ours[:-1])


def _over(throughput: Sequence[float | None], at: int) -> float | None:
    most, other = throughput[-1], throughput[at]
    return most / other if most and other else None


def plotted(models: Sequence[Served], point: Point) -> float:
    """Returns what figure 5 plots."""
    return sum(int(model.rate) * point.throughput[model.name] for model in models) / len(models)


def figure_5(scale: Scale, tell: Tell) -> Report:
    """Synthetic loads: 19 LLMs, whose rates fall by a power law."""
    alphas = [*FIGURE_5] if scale == "full" else ["2.1"]
    times = TIMES[scale]
    seconds = SECONDS[scale]
    rows: dict[tuple[str, float], Row] = {}
    for n, (alpha, factor) in enumerate(product(alphas, times)):
        models = falling(SYNTHETIC, float(alpha), TOP * factor)
        after = seconds if alpha in ATTAINED and factor == 1.0 else 0.0
        load = Load(models, GPUS, seconds, after)
        part = part_of(tell, n, len(alphas) * len(times))
        points = play_points([(system, load) for system in SYSTEMS], part)
        ours = [plotted(models, point) for point in points]
        rows[alpha, factor] = Row(f"α {alpha}, rates × {factor:g}", FIGURE_5[alpha][factor], ours, points)
    gains = {
        alpha: sum(_over(rows[alpha, factor].ours, 0) or 0.0 for factor in times) / len(times)
        for alpha in alphas
    }
    best = max(rows.values(), key=lambda row: row.best)
    return Report(
        name="figure 5",
        title="19 LLMs on 32 GPUs: Σ ⌊rate⌋ · throughput / 19, and requests in time",
        cells=(*(cell for row in rows.values() for cell in row.cells()), *_in_time(rows)),
        claims=(
            _most([*rows.values()]),
            _grows("the gain over spatial partitioning grows with α", gains),
            Claim(
                said="up to 1.8× the throughput of the others",
                holds=best.best >= 1.8 * (1 - _SLACK),
                found=f"up to {best.best:.2f}× that of the better one ({best.name})",
            ),
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
        for system, percents, point in zip(SYSTEMS, told, rows[alpha, 1.0].points, strict=True)
        for scale, percent in zip(SCALES, percents, strict=True)
        if scale in point.attained
    ]


def _most(rows: Sequence[Row]) -> Claim:
    least = min(rows, key=lambda row: row.best)
    return Claim(
        said="MuxServe has the highest throughput at every point",
        holds=least.best >= 1.0,
        found=f"{least.best:.2f}× the better other at the least ({least.name})",
    )


def _grows(said: str, values: Mapping[str, float]) -> Claim:
    found = [*values.values()]
    rises = all(later >= (1 - _SLACK) * earlier for earlier, later in pairwise(found))
    told = ", ".join(f"{value:.2f}× at {key}" for key, value in values.items())
    return Claim(said=said, holds=rises and found[-1] >= found[0], found=told)


def figure_7(scale: Scale, tell: Tell) -> Report:
    """ChatLMSYS: 16 LLMs, whose rates are those of real traffic."""
    averages = [*FIGURE_7] if scale == "full" else [3.0]
    rows = []
    for n, average in enumerate(averages):
        models = served(CHAT, (rate * average / _AVERAGE for rate in CHAT_RATES), CHATLMSYS)
        load = Load(models, GPUS, SECONDS[scale])
        points = play_points([(system, load) for system in SYSTEMS], part_of(tell, n, len(averages)))
        ours = [point.weighted(models) for point in points]
        rows.append(Row(f"{average:g} req/s a model", FIGURE_7[average], ours, points))
    return Report(
        name="figure 7",
        title="16 LLMs of ChatLMSYS on 32 GPUs: throughput weighted with rates",
        cells=tuple(cell for row in rows for cell in row.cells()),
        claims=(_most(rows), _sooner(rows)),
    )


def _sooner(rows: Sequence[Row]) -> Claim:
    shares = [[point.attained.get(_SLO, 0.0) for point in row.points] for row in rows]
    told = "; ".join(" / ".join(f"{share:.0%}" for share in each) for each in shares)
    return Claim(
        said=f"MuxServe has the most requests within {_SLO}× of what they take alone, at every rate",
        holds=all(each[-1] >= max(each) for each in shares),
        found=f"spatial / temporal / MuxServe: {told}",
    )
