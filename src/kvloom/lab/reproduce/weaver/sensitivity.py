"""The gain by the cold model's rate and the share that is offloaded (section 5.2, figure 5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvloom.lab.reproduce.report import NEAR, Cell, Claim, Grid, Report, Scale, Tell, cells
from kvloom.lab.reproduce.weaver.serving import DEDICATED_MOST, seconds_of
from kvloom.lab.reproduce.weaver.setup import (
    AZURE,
    BARE_MUXSERVE,
    BARE_TEMPORAL,
    BURSTGPT,
    MUXSERVE,
    TEMPORAL,
    WEAVER,
    Load,
    Point,
    System,
    play_points,
    sharing,
)

# What the paper tells: figure 5, read off: milliseconds a token, over the ratios, from and to
PAPER_RATIOS: Final = {
    "Weaver": ((27.0, 28.0), (20.0, 25.0)),
    "MuxServe": ((31.0, 31.0), (16.0, 20.5)),
    "Mux-Temporal": ((35.0, 44.0), (33.0, 44.0)),
}
SYSTEMS: Final = (WEAVER, MUXSERVE, BARE_MUXSERVE, TEMPORAL, BARE_TEMPORAL)
HALF_QUICKER: Final = 13.0  # % at a share of 50 %
HALF_LONGER: Final = 3.7  # ms of the cold model then
BEST_SHARE: Final = 0.45

DEVICE: Final = "A100-40"
HOT_RATE: Final = 10.0  # requests a second, of (a)
RATIOS: Final = (0.1, 0.25, 0.5)  # of the cold model's rate to it; the paper's are not told
SHARE_RATE: Final = DEDICATED_MOST  # of (b)
SHARES: Final = (0.0, 0.15, 0.3, 0.45, 0.5, 0.6, 0.75)

Found = dict[tuple[str, float], Point]


def figure_5(scale: Scale, tell: Tell) -> Report:
    """Plays (a) BurstGPT and (b) Azure, the traces whose published times a token fit the rates."""
    ratios, shares = (RATIOS, SHARES) if scale == "full" else (RATIOS[:1], (0.0, 0.5))
    base = Load(DEVICE, BURSTGPT, HOT_RATE, seconds_of(BURSTGPT, scale))
    first = [(system, replace(base, cold=part * HOT_RATE)) for part in ratios for system in SYSTEMS]
    other = Load(DEVICE, AZURE, SHARE_RATE, seconds_of(AZURE, scale))
    second = [(sharing(share), other) for share in shares]
    points = play_points([*first, *second], tell)
    by_ratio: Found = {
        (system.name, load.cold / HOT_RATE): point
        for (system, load), point in zip(first, points[: len(first)], strict=True)
    }
    by_share = dict(zip(shares, points[len(first) :], strict=True))
    return Report(
        name="figure 5",
        title="the cold model's rate at 10 req/s of the hot one; the share at 15 req/s",
        cells=(*_ratio_cells(by_ratio), *_share_cells(by_share)),
        claims=(*_ratio_claims(by_ratio), *_share_claims(by_share)),
        grids=(
            _grid("(a) ms a token by the ratio of rates", [(*key, point) for key, point in by_ratio.items()]),
            _grid("(b) by share", [("Weaver", share, point) for share, point in by_share.items()]),
        ),
    )


def _ratio_cells(found: Found) -> list[Cell]:
    """The ends of the paper's ranges are those of its ratios, whichever they are."""
    told = []
    for system in SYSTEMS:
        points = [point for (name, _), point in found.items() if name == system.name]
        for model, papers in zip(
            ("hot", "cold"), PAPER_RATIOS[system.name.removesuffix(", bare")], strict=True
        ):
            times = [1e3 * (point.hot if model == "hot" else point.cold).tpot for point in points]
            for end, paper, ours in zip(("least", "most"), papers, (min(times), max(times)), strict=True):
                told += cells(f"(a) {system.name}", (f"{model}, {end} ms", paper, ours))
    return told


def _ratio_claims(found: Found) -> list[Claim]:
    def gains(over: System) -> list[float]:
        ratios = dict.fromkeys(ratio for _, ratio in found)
        return [
            100 * (1 - found[WEAVER.name, ratio].hot.tpot / found[over.name, ratio].hot.tpot)
            for ratio in ratios
        ]

    claims = []
    muxserve, temporal = ("15 %", (15, 15)), ("20 to 40 %", (20, 40))
    overs = ((MUXSERVE, muxserve), (BARE_MUXSERVE, muxserve), (TEMPORAL, temporal), (BARE_TEMPORAL, temporal))
    for over, (told, (low, high)) in overs:
        least, most = min(gains(over)), max(gains(over))
        near = low <= least * (1 + NEAR) and most <= high * (1 + NEAR)
        said = f"at every ratio the hot model's time a token is {told} shorter than under {over.name}"
        claims.append(Claim(said=said, holds=near, found=f"by {least:.0f} to {most:.0f} %"))
    return claims


def _share_cells(found: dict[float, Point]) -> list[Cell]:
    none, half = found[0.0], found[0.5]
    quicker, longer = 100 * (1 - half.hot.tpot / none.hot.tpot), 1e3 * (half.cold.tpot - none.cold.tpot)
    return cells(
        "(b) 50 % away",
        ("hot, % shorter", HALF_QUICKER, quicker),
        ("cold, ms longer", HALF_LONGER, longer),
    )


def _share_claims(found: dict[float, Point]) -> list[Claim]:
    best = min(found, key=lambda share: found[share].hot.tpot)
    cold = [1e3 * point.cold.tpot for point in found.values()]
    return [
        Claim(
            said="the hot model is fastest with 45 % away",
            holds=abs(best - BEST_SHARE) <= 0.05,
            found=f"with {100 * best:.0f} % of those tried",
        ),
        Claim(
            said="the cold model's time a token grows with the share",
            holds=cold == sorted(cold),
            found=", ".join(f"{ms:.1f}" for ms in cold) + " ms",
        ),
    ]


def _grid(title: str, rows: list[tuple[str, float, Point]]) -> Grid:
    return Grid(
        title=title,
        heads=("system", "at", "hot", "P99", "cold", "P99"),
        rows=tuple((name, f"{at:g}", *_times(point)) for name, at, point in rows),
    )


def _times(point: Point) -> list[str]:
    both = (point.hot, point.cold)
    return [f"{1e3 * seconds:.1f}" for course in both for seconds in (course.tpot, course.p99)]
