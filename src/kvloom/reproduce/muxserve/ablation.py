"""What each part of MuxServe is worth (section 4.4): figures 8 and 9."""

from __future__ import annotations

from typing import Final

from kvloom.reproduce.muxserve.point import SECONDS, Load, play_all
from kvloom.reproduce.muxserve.published import PUBLISHED
from kvloom.reproduce.muxserve.setup import Served, falling, served
from kvloom.reproduce.muxserve.systems import MUXSERVE, System, naive, together
from kvloom.reproduce.report import Cell, Grid, Report, Scale, Tell

NAIVE: Final = System("naive placement", naive)
PARTS: Final = System("in parts", together, policy="partitioned", quotas="fixed")
SEPARATED: Final = System("separated phases", together, quotas="fixed")
UNIFIED: Final = System("unified memory", together)

# The paper tells how many LLMs, that half of them are popular and have more than 70 % of the requests, and
# nothing of sizes and rates.
PLACED: Final[tuple[tuple[str, tuple[Served, ...], int], ...]] = (
    ("4 LLMs on 8 GPUs", served(("7b", "13b", "7b", "30b"), (20.0, 20.0, 6.0, 6.0)), 8),
    (
        "7 LLMs on 16 GPUs",
        served(("7b", "7b", "13b", "7b", "7b", "13b", "30b"), (20.0, 20.0, 20.0, 6.0, 6.0, 6.0, 6.0)),
        16,
    ),
)
ALPHAS: Final = (0.7, 1.3, 2.1)
MANAGED: Final = ("7b", "7b", "13b", "30b")
TOP: Final = 10.0  # requests a second
_SLO: Final = 8


def figure_8(scale: Scale, tell: Tell) -> Report:
    """Placement by algorithm 1 against the naive one."""
    runs = [
        (system, Load(models, gpus, SECONDS[scale]))
        for _, models, gpus in PLACED
        for system in (NAIVE, MUXSERVE)
    ]
    points = play_all(runs, tell)
    cells, rows = [], []
    for (name, models, _), poor, good in zip(PLACED, points[::2], points[1::2], strict=True):
        gain = good.weighted(models) / poor.weighted(models)
        paper = PUBLISHED.figure_8.gain if name == PLACED[-1][0] else None
        cells.append(Cell(row=name, column="throughput over the naive placement's", paper=paper, ours=gain))
        rows += [
            (name, system.name, f"{point.weighted(models):.2f}", f"{point.total:.2f}")
            for system, point in ((NAIVE, poor), (MUXSERVE, good))
        ]
    grid = Grid(title="req/s", heads=("", "placement", "weighted with rates", "in all"), rows=tuple(rows))
    return Report(name="figure 8", title="the placement", cells=tuple(cells), grids=(grid,))


def figure_9(scale: Scale, tell: Tell) -> Report:
    """4 LLMs on 4 GPUs: compute and memory in parts; phases apart; and one pool for all."""
    alphas = ALPHAS if scale == "full" else ALPHAS[:1]
    systems = (PARTS, SEPARATED, UNIFIED)
    loads = [Load(falling(MANAGED, alpha, TOP), 4, SECONDS[scale], after=SECONDS[scale]) for alpha in alphas]
    points = play_all([(system, load) for load in loads for system in systems], tell)
    by_load = [points[at : at + 3] for at in range(0, len(points), 3)]
    weighted = [
        [point.weighted(load.models) for point in found] for load, found in zip(loads, by_load, strict=True)
    ]
    in_time = [[point.attained[_SLO] for point in found] for found in by_load]
    published = PUBLISHED.figure_9
    gains = (
        ("throughput by separated phases", published.separation, [b / a for a, b, _ in weighted]),
        ("throughput by one pool, besides", published.unified, [c / b for _, b, c in weighted]),
        (f"requests within {_SLO}×, by one pool", published.attained, [c / b for _, b, c in in_time if b]),
    )
    grid = Grid(
        title=f"req/s weighted with rates, and requests within {_SLO}× of what they take alone",
        heads=("α", *(system.name for system in systems)),
        rows=tuple(
            (f"{alpha:g}", *(f"{rate:.2f}, {part:.0%}" for rate, part in zip(rates, parts, strict=True)))
            for alpha, rates, parts in zip(alphas, weighted, in_time, strict=True)
        ),
    )
    return Report(
        name="figure 9",
        title="the resource manager, 4 LLMs on 4 GPUs",
        cells=tuple(
            Cell(row="at best", column=f"times the {what}", paper=paper, ours=max(found, default=0.0))
            for what, paper, found in gains
        ),
        grids=(grid,),
    )
