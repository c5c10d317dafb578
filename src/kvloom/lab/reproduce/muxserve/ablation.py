"""The worth of each part of MuxServe (section 4.4, figures 8 to 10), and the cost model (figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

from kvloom.lab.reproduce.muxserve.points import Point, play_points
from kvloom.lab.reproduce.muxserve.setup import (
    AS_LONG,
    DEVICE,
    SECONDS,
    SHAREGPT,
    Load,
    Served,
    falling,
    served,
)
from kvloom.lab.reproduce.muxserve.systems import (
    KVLOOM,
    MUXSERVE,
    PREFILLS,
    AsPublished,
    System,
    naive,
    together,
)
from kvloom.lab.reproduce.report import Cell, Claim, Grid, Report, Scale, Tell, cells
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.cost.work import Work

_MODEL: Final = "llama-7b"
_TOKENS: Final = 128  # of each sequence
_SLIGHT: Final = 1.5  # times as long counts as little
_SMALL, _LARGE, _PREFILL = "decode, batch 1", "decode, batch 128", "prefill, batch 1"


# Milliseconds of a job on each share of the multiprocessors: of the notebooks published with the paper
FIGURE_3_SHARES: Final = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
FIGURE_3: Final = {
    _PREFILL: (30.4, 27.7, 21.3, 17.6, 17.2, 16.5, 16.4, 16.0),
    _SMALL: (16.8, 14.5, 12.6, 12.3, 12.0, 11.9, 11.5, 11.5),
    _LARGE: (43.9, 40.9, 32.5, 28.6, 27.1, 24.9, 25.1, 24.2),
}


def figure_3(_: Scale, tell: Tell) -> Report:
    """Compares the cost model with what the paper has measured."""
    ours = {row: [seconds(row, share) * 1e3 for share in FIGURE_3_SHARES] for row in FIGURE_3}
    tell("the cost model", 1.0)
    columns = [f"ms at {share:.0%}" for share in FIGURE_3_SHARES]
    told = [cells(row, *zip(columns, FIGURE_3[row], ours[row], strict=True)) for row in FIGURE_3]
    slower = {row: found[0] / found[-1] for row, found in ours.items()}
    claims = (
        Claim(
            said="decode on 30 % of the multiprocessors takes little longer than on all",
            holds=slower[_SMALL] <= _SLIGHT,
            found=f"{slower[_SMALL]:.2f}× in batches of 1, {slower[_LARGE]:.2f}× of 128",
        ),
        Claim(
            said="prefill takes longer by more than decode does",
            holds=slower[_PREFILL] > slower[_SMALL],
            found=f"{slower[_PREFILL]:.2f}× against {slower[_SMALL]:.2f}×",
        ),
    )
    return Report(
        name="figure 3",
        title="a job's latency by its share of the device, LLaMA-7B, 128 tokens",
        cells=tuple(chain.from_iterable(told)),
        claims=claims,
    )


def seconds(row: str, share: float) -> float:
    """Returns the seconds of one of the figure's jobs."""
    cost = Roofline(find_device(DEVICE), 1, {_MODEL: find_shape(_MODEL)})
    phase, batch = row.split(", batch ")
    works = {"prefill": Work.prefill, "decode": Work.decode}
    return cost.seconds(works[phase](_MODEL, share, [_TOKENS] * int(batch)))


NAIVE: Final = replace(MUXSERVE, name="naive placement", place=naive)
UNIFIED: Final = replace(MUXSERVE, name="unified memory", place=together)
SEPARATED: Final = replace(UNIFIED, name="separated phases", quotas="fixed-sequences", rooms="equal")
PARTS: Final = replace(SEPARATED, name="in parts", policy="partitioned")
TOGETHER: Final = System("kvloom", together)

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
PLACINGS: Final = (NAIVE, MUXSERVE, KVLOOM)
FIGURE_8: Final = 1.3  # times as much throughput
ALPHAS: Final = (0.7, 1.3, 2.1)
MANAGED: Final = ("7b", "7b", "13b", "30b")
TOP: Final = 10.0  # requests a second
_SLO: Final = 8


def figure_8(scale: Scale, tell: Tell) -> Report:
    """Compares placement by algorithm 1 with the naive one."""
    runs = [(system, Load(models, gpus, SECONDS[scale])) for _, models, gpus in PLACED for system in PLACINGS]
    points = play_points(runs, tell)
    told, rows = [], []
    for (name, models, _), at in zip(PLACED, range(0, len(points), len(PLACINGS)), strict=True):
        found = points[at : at + len(PLACINGS)]
        poor, good, own = (point.weighted(models) for point in found)
        paper = FIGURE_8 if name == PLACED[-1][0] else None
        told += cells(
            name,
            ("MuxServe's throughput over the naive placement's", paper, good / poor),
            ("kvloom's over MuxServe's", None, own / good),
        )
        rows += [
            (name, system.name, f"{point.weighted(models):.2f}", f"{point.total:.2f}")
            for system, point in zip(PLACINGS, found, strict=True)
        ]
    grid = Grid(title="req/s", heads=("", "placement", "weighted with rates", "in all"), rows=tuple(rows))
    return Report(name="figure 8", title="the placement", cells=tuple(told), grids=(grid,))


def figure_9(scale: Scale, tell: Tell) -> Report:
    """Plays 4 LLMs on 4 GPUs: with compute and memory in parts, with phases apart, and with one pool for
    all."""
    alphas = ALPHAS if scale == "full" else ALPHAS[:1]
    systems = (PARTS, SEPARATED, UNIFIED, TOGETHER)
    loads = [Load(falling(MANAGED, alpha, TOP), 4, AS_LONG[scale]) for alpha in alphas]
    points = play_points([(system, load) for load in loads for system in systems], tell)
    by_load = [points[at : at + len(systems)] for at in range(0, len(points), len(systems))]
    weighted = [
        [point.weighted(load.models) for point in found] for load, found in zip(loads, by_load, strict=True)
    ]
    in_time = [[point.attained[_SLO] for point in found] for found in by_load]
    gains: tuple[tuple[str, float, float], ...] = (
        ("times the throughput by separated phases", 1.7, max(b / a for a, b, *_ in weighted)),
        ("times the throughput by one pool, besides", 1.2, max(c / b for _, b, c, _ in weighted)),
        (
            f"times the requests within {_SLO}×, by one pool",
            3.6,
            max((c / b for _, b, c, _ in in_time if b), default=0.0),
        ),
    )  # the second number is the paper's
    least = min(d / c for _, _, c, d in weighted)
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
        cells=(
            *cells("at best", *gains),
            *cells("at the least", ("kvloom's throughput over MuxServe's", None, least)),
        ),
        grids=(grid,),
    )


GPUS: Final = 4
_SHARED: Final = System("", together, estimator=AsPublished, prefills=PREFILLS)  # a unit as published
POLICIES: Final = (
    replace(_SHARED, name="FCFS", policy="vllm-2023", shares="whole"),
    replace(_SHARED, name="round-robin", policy="adbs-2024"),
    replace(UNIFIED, name="ADBS", rooms="by rate and length"),
    replace(_SHARED, name="kvloom's adbs there"),
    TOGETHER,
)
PUBLISHED: Final = 3  # of them, the first ones


@dataclass(frozen=True, slots=True)
class Setting:
    """A set of models that share a unit, and what the paper has under each policy."""

    name: str
    models: tuple[Served, ...]
    weighted: tuple[float, ...]
    """The throughput, weighted with the rates."""
    blocks: tuple[str, ...]
    """The percent of the blocks in use, by model."""


SETTINGS: Final = (
    Setting(
        "(a) 30B, 13B, 7B",
        (
            Served("30b", "30b", 2.0, SHAREGPT.scaled(322, 676)),
            Served("13b", "13b", 8.0),
            Served("7b", "7b", 8.0),
        ),
        (3.8, 4.1, 6.2),
        ("–", "–", "–"),
    ),
    Setting(
        "(b) 65B, 30B",
        (
            Served("65b", "65b", 1.0, SHAREGPT.scaled(778, 251)),
            Served("30b", "30b", 8.0, SHAREGPT.scaled(128, 126)),
        ),
        (3.16, 4.9, 6.55),
        ("46 : 54", "46 : 54", "18 : 82"),
    ),
)


def figure_10(scale: Scale, tell: Tell) -> Report:
    """Plays models that share a unit, under each policy."""
    runs = [(policy, Load(one.models, GPUS, AS_LONG[scale])) for one in SETTINGS for policy in POLICIES]
    points = play_points(runs, tell)
    told: list[Cell] = []
    rows: list[tuple[str, ...]] = []
    for setting, at in zip(SETTINGS, range(0, len(points), len(POLICIES)), strict=True):
        found = points[at : at + len(POLICIES)]
        told += _cells(setting, found)
        blocks = (*setting.blocks, *("–",) * (len(POLICIES) - PUBLISHED))
        rows += [
            (
                setting.name,
                policy.name,
                f"{point.total:.2f}",
                f"{sum(point.answered.values()):.2f}",
                _shares(point),
                share,
            )
            for policy, point, share in zip(POLICIES, found, blocks, strict=True)
        ]
    grid = Grid(
        title="All requests, those that ended a second in the second half of the time, and who has how many "
        "of the blocks",
        heads=("", "policy", "req/s in all", "in the second half", "% of the blocks", "in the paper"),
        rows=tuple(rows),
    )
    return Report(
        name="figure 10",
        title="batching policies on 4 GPUs: req/s weighted with rates",
        cells=tuple(told),
        grids=(grid,),
    )


def _cells(setting: Setting, points: Sequence[Point]) -> list[Cell]:
    ours = [point.weighted(setting.models) for point in points]
    paper = [*setting.weighted, *(None,) * (len(POLICIES) - PUBLISHED)]
    names = [policy.name for policy in POLICIES]
    adbs, theirs = PUBLISHED - 1, setting.weighted
    leads = [
        (f"ADBS over {names[at]}", theirs[adbs] / theirs[at], ours[adbs] / ours[at]) for at in range(adbs)
    ]
    own = [(f"{names[at]} over ADBS", None, ours[at] / ours[adbs]) for at in range(PUBLISHED, len(names))]
    return cells(setting.name, *zip(names, paper, ours, strict=True), *leads, *own)


def _shares(point: Point) -> str:
    return " : ".join(f"{100 * part:.0f}" for part in point.blocks.values())
