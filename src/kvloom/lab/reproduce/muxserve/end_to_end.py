"""Whole systems on 32 GPUs (MuxServe, sections 4.2 and 4.3): figures 5 and 7."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from kvloom.lab.reproduce.muxserve.point import SECONDS, Load, Point, play_all
from kvloom.lab.reproduce.muxserve.setup import (
    CHATLMSYS,
    MUXSERVE,
    PUBLISHED,
    SPATIAL,
    TEMPORAL,
    Served,
    falling,
    served,
)
from kvloom.lab.reproduce.report import Cell, Claim, Report, Scale, Tell, part_of

GPUS: Final = 32
SYSTEMS: Final = (SPATIAL, TEMPORAL, MUXSERVE)
SYNTHETIC: Final = ("7b",) * 12 + ("13b",) * 4 + ("30b",) * 2 + ("65b",)
CHAT: Final = ("7b",) * 4 + ("13b",) * 6 + ("30b",) * 3 + ("65b",) * 3
TOP: Final = 20.0  # requests a second of the most popular model at rate scale 1
TIMES: Final[Mapping[Scale, Sequence[float]]] = {"full": (1.0, 2.0), "small": (1.0,)}  # of the rate
AVERAGES: Final[Mapping[Scale, Sequence[float]]] = {"full": (3.0, 7.1, 11.9), "small": (3.0,)}
_AVERAGE: Final = 7.1  # requests a second and model, where the rates are as published
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
        own = zip(SYSTEMS, self.paper, self.ours, strict=True)
        cells = [
            Cell(row=self.name, column=system.name, paper=paper, ours=ours) for system, paper, ours in own
        ]
        for at, system in enumerate(SYSTEMS[:-1]):
            column, paper, ours = f"MuxServe over {system.name}", _over(self.paper, at), _over(self.ours, at)
            cells.append(Cell(row=self.name, column=column, paper=paper, ours=ours or 0.0))
        return cells

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
    published = PUBLISHED.figure_5
    alphas = [*published.throughput] if scale == "full" else ["2.1"]
    times = TIMES[scale]
    seconds = SECONDS[scale]
    rows: dict[tuple[str, float], Row] = {}
    for n, alpha in enumerate(alphas):
        for m, factor in enumerate(times):
            models = falling(SYNTHETIC, float(alpha), TOP * factor)
            load = Load(
                models, GPUS, seconds, after=seconds if alpha in published.attained and factor == 1.0 else 0.0
            )
            part = part_of(tell, n * len(times) + m, len(alphas) * len(times))
            points = play_all([(system, load) for system in SYSTEMS], part)
            paper = published.throughput[alpha][published.scales.index(factor)]
            ours = [plotted(models, point) for point in points]
            rows[alpha, factor] = Row(f"α {alpha}, rates × {factor:g}", paper, ours, points)
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
    published = PUBLISHED.figure_5
    return [
        Cell(
            row=f"α {alpha}, {system}",
            column=f"% within {scale}× of alone",
            paper=percent,
            ours=100 * point.attained[scale],
        )
        for alpha, told in published.attained.items()
        if (alpha, 1.0) in rows
        for system, percents, point in zip(published.systems, told, rows[alpha, 1.0].points, strict=True)
        for scale, percent in zip(published.slo_scales, percents, strict=True)
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
    published = PUBLISHED.figure_7
    averages = AVERAGES[scale]
    rows = []
    for n, average in enumerate(averages):
        models = served(CHAT, (rate * average / _AVERAGE for rate in published.rates), CHATLMSYS)
        load = Load(models, GPUS, SECONDS[scale])
        points = play_all([(system, load) for system in SYSTEMS], part_of(tell, n, len(averages)))
        ours = [point.weighted(models) for point in points]
        rows.append(
            Row(
                f"{average:g} req/s a model",
                published.throughput[published.averages.index(average)],
                ours,
                points,
            )
        )
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
