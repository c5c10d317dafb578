"""Adaptive batch scheduling against first come first served and round-robin (section 4.4): figure 10."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvloom.reproduce.muxserve.point import SECONDS, Load, Point, play_all
from kvloom.reproduce.muxserve.published import PUBLISHED, Setting10
from kvloom.reproduce.muxserve.setup import Served, like_sharegpt
from kvloom.reproduce.muxserve.systems import System, together
from kvloom.reproduce.report import Cell, Grid, Report, Scale, Tell

GPUS: Final = 4
LONGER: Final = 2  # times, than this figure's other loads: a pool of 200 GB takes a while to fill
POLICIES: Final = (
    System("FCFS", together, policy="fcfs", shares="whole"),
    System("round-robin", together, policy="round-robin"),
    System("ADBS", together),
)
SETTINGS: Final[tuple[tuple[str, Setting10, tuple[Served, ...]], ...]] = (
    (
        "(a) 30B, 13B, 7B",
        PUBLISHED.figure_10.a,
        (
            Served("30b", "30b", 2.0, like_sharegpt(322, 676)),
            Served("13b", "13b", 8.0),
            Served("7b", "7b", 8.0),
        ),
    ),
    (
        "(b) 65B, 30B",
        PUBLISHED.figure_10.b,
        (
            Served("65b", "65b", 1.0, like_sharegpt(778, 251)),
            Served("30b", "30b", 8.0, like_sharegpt(128, 126)),
        ),
    ),
)


def figure_10(scale: Scale, tell: Tell) -> Report:
    """Models that share a unit, under each policy."""
    seconds = LONGER * SECONDS[scale]
    runs = [(policy, Load(models, GPUS, seconds)) for _, _, models in SETTINGS for policy in POLICIES]
    points = play_all(runs, tell)
    cells: list[Cell] = []
    rows: list[tuple[str, ...]] = []
    for (name, paper, models), at in zip(SETTINGS, range(0, len(points), len(POLICIES)), strict=True):
        found = points[at : at + len(POLICIES)]
        cells += _cells(name, paper, models, found)
        rows += [
            (name, policy.name, f"{point.total:.2f}", _shares(point), told)
            for policy, point, told in zip(POLICIES, found, _published_shares(paper), strict=True)
        ]
    grid = Grid(
        title="All requests, and who has how many of the blocks",
        heads=("", "policy", "req/s in all", "% of the blocks", "in the paper"),
        rows=tuple(rows),
    )
    return Report(
        name="figure 10",
        title="batching policies on 4 GPUs: req/s weighted with rates",
        cells=tuple(cells),
        grids=(grid,),
    )


def _cells(name: str, paper: Setting10, models: Sequence[Served], points: Sequence[Point]) -> list[Cell]:
    ours = [point.weighted(models) for point in points]
    cells = [
        Cell(row=name, column=policy.name, paper=told, ours=found)
        for policy, told, found in zip(POLICIES, paper.weighted, ours, strict=True)
    ]
    cells += [
        Cell(
            row=name,
            column=f"ADBS over {POLICIES[at].name}",
            paper=paper.weighted[-1] / paper.weighted[at],
            ours=ours[-1] / ours[at],
        )
        for at in range(2)
    ]
    return cells


def _shares(point: Point) -> str:
    return " : ".join(f"{100 * part:.0f}" for part in point.blocks.values())


def _published_shares(paper: Setting10) -> list[str]:
    told = [" : ".join(f"{part:g}" for part in parts) for parts in paper.blocks]
    return told or ["–"] * len(POLICIES)
