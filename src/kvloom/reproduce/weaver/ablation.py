"""What finds a task: the lender's host, its device, and its device between parts of operators (section 5.3):
figure 7a."""

from __future__ import annotations

from typing import Final

from kvloom.reproduce.report import Cell, Claim, Grid, Report, Scale, Tell
from kvloom.reproduce.weaver import published
from kvloom.reproduce.weaver.point import Load, play_points
from kvloom.reproduce.weaver.setup import Trace
from kvloom.reproduce.weaver.systems import SHARE, System, weave, woven

DEVICE: Final = "A100-40"
BATCH: Final = 128  # of the hot model, all the time: chosen, because no rate is told
ANSWERS: Final = {"full": 512, "small": 24}  # tokens
PROMPT: Final = 749
LONGEST: Final = 400.0  # seconds

GAIN: Final = 1.05

CONTROLLED: Final = (
    System("CPU control", woven(weave(SHARE, "iterations", "none"))),
    System("+ GPU control", woven(weave(SHARE, split="none"))),
    System("+ operator splitting", woven(weave(SHARE))),
)


def figure_7(scale: Scale, tell: Tell) -> Report:
    """(a); times to the first token, (b), are those of GPUs that are not simulated."""
    trace = Trace(f"{BATCH} at once", None, PROMPT, ANSWERS[scale])
    load = Load(DEVICE, trace, 0.0, LONGEST, at_once=BATCH)
    points = play_points([(system, load) for system in CONTROLLED], tell)
    cpu, gpu, split = (1e3 * point.hot.tpot for point in points)
    cold = [1e3 * point.cold.tpot for point in points]
    quicker, longer = 100 * (1 - split / gpu), cold[2] - cold[1]
    return Report(
        name="figure 7",
        title=f"(a) who looks for tasks: {BATCH} sequences of the hot model",
        cells=(
            Cell(row="hot", column="CPU control, ms", paper=published.CPU_CONTROL, ours=cpu),
            Cell(
                row="hot", column="GPU control, times as quick", paper=published.GPU_CONTROL, ours=cpu / gpu
            ),
            Cell(row="hot", column="splitting, % quicker", paper=published.SPLITTING, ours=quicker),
            Cell(row="cold", column="splitting, ms longer", paper=published.SPLITTING_COLD, ours=longer),
        ),
        claims=(
            Claim(
                said="each step makes the hot model quicker, by 5 % at least",
                holds=cpu > GAIN * gpu > GAIN**2 * split,
                found=f"{cpu:.0f}, {gpu:.1f}, {split:.1f} ms",
            ),
        ),
        grids=(
            Grid(
                title="ms a token",
                heads=("", "hot", "cold"),
                rows=tuple(
                    (system.name, f"{1e3 * point.hot.tpot:.1f}", f"{1e3 * point.cold.tpot:.1f}")
                    for system, point in zip(CONTROLLED, points, strict=True)
                ),
            ),
        ),
    )
