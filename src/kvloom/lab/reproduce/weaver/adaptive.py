"""The choice of `share: auto` beside a sweep of fixed shares. The paper leaves a share that adapts to future
work (section 4.3), so nothing here is compared with it."""

from __future__ import annotations

from typing import Final

from kvloom.lab.reproduce.report import Cell, Grid, Report, Scale, Tell
from kvloom.lab.reproduce.weaver.serving import seconds_of
from kvloom.lab.reproduce.weaver.setup import (
    AZURE,
    BOUND,
    DEDICATED,
    Load,
    Point,
    System,
    dedicated,
    play_points,
    sharing,
    weave,
)

DEVICE: Final = "A100-40"
RATES: Final = {
    "full": (15.0, 20.0, 28.0),
    "small": (28.0,),
}  # of the hot model; the last more than is answered
SHARES: Final = {"full": (0.15, 0.3, 0.45), "small": (0.45,)}
WIDE: Final = 0.6  # a bound that the best fixed share keeps
_SLACK: Final = 0.02  # answers a second that are alike

Found = dict[tuple[float, str], Point]


def _auto(bound: float) -> System:
    return System(f"auto, bound {100 * bound:.0f} %", dedicated(weave("auto", bound=bound)))


BOUNDS: Final = (BOUND, WIDE)


def share_auto(scale: Scale, tell: Tell) -> Report:
    """Plays fixed shares and `auto` under the same loads. The best share that keeps a bound answers most, and
    of those that answer alike, its hot model is the quickest."""
    fixed = (DEDICATED, *map(sharing, SHARES[scale]))
    systems = (*fixed, *map(_auto, BOUNDS))
    loads = [Load(DEVICE, AZURE, rate, seconds_of(AZURE, scale)) for rate in RATES[scale]]
    plan = [(system, load) for load in loads for system in systems]
    found: Found = {
        (load.hot, system.name): point
        for (system, load), point in zip(plan, play_points(plan, tell), strict=True)
    }
    told = list[Cell]()
    for load in loads:
        alone = found[load.hot, DEDICATED.name]
        swept = {system.name: found[load.hot, system.name] for system in fixed}
        for bound in BOUNDS:
            best, auto = _best(swept, alone, bound), found[load.hot, _auto(bound).name]
            row = f"{load.hot:g} req/s, bound {100 * bound:.0f} %, best {best}"
            for column, ours in (
                ("auto's answers over the best's", auto.hot.rate / swept[best].hot.rate),
                ("auto's time a token over the best's", auto.hot.tpot / swept[best].hot.tpot),
                ("cold, times as long as alone", _slower(auto, alone)),
            ):
                told.append(Cell(row=row, column=column, paper=None, ours=ours))
    return Report(
        name="auto",
        title="the share that adapts beside the best fixed one, A100-40, Azure-Conv",
        cells=tuple(told),
        grids=(_grid(found),),
    )


def _slower(point: Point, alone: Point) -> float:
    return point.cold.tpot / alone.cold.tpot if alone.cold.tpot else 1.0


def _best(swept: dict[str, Point], alone: Point, bound: float) -> str:
    """Returns the fixed share that is best of those that keep the bound; nothing offloaded always does."""
    fits = {name: point for name, point in swept.items() if _slower(point, alone) <= 1.0 + bound}
    most = max(point.hot.rate for point in fits.values())
    alike = {name: point for name, point in fits.items() if point.hot.rate >= most * (1.0 - _SLACK)}
    return min(alike, key=lambda name: alike[name].hot.tpot)


def _grid(found: Found) -> Grid:
    rows = []
    for (rate, name), point in found.items():
        times = (f"{1e3 * course.tpot:.1f}" for course in (point.hot, point.cold))
        rows.append((f"{rate:g}", name, f"{point.hot.rate:.1f}", *times, f"{100 * point.share:.0f}"))
    heads = ("req/s", "share", "answered", "hot, ms", "cold, ms", "share in the mean, %")
    return Grid(title="All points", heads=heads, rows=tuple(rows))
