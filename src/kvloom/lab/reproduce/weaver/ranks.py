"""The cost of tensor parallelism (section 2.3, table 1): two instances on a GPU each, or one over both. The
constant of ranks for all of Weaver's figures is fitted here, to the one number that the paper tells of its
table."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from kvloom.lab.reproduce.report import Cell, Claim, Grid, Report, Scale, Tell, cells
from kvloom.plan.cost.devices import FITTED, Constants, find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.cost.work import Work

MODEL: Final = "llama3-8b"
DEVICE: Final = "A100-40"
MOST_LOST: Final = 0.26  # of the throughput, "up to"
PROMPT: Final = 1024  # tokens
OUTPUT: Final = 128
BATCHES: Final = (1, 2, 4, 8, 16, 32, 64)  # sequences a GPU, as many as the pool holds

HOP: Final = 171e-6  # seconds, as `fitted_hop` finds it


def with_hop(hop: float) -> Constants:
    """Returns the constants fitted to MuxServe's profile, but for the seconds that an all-reduce takes
    however little it carries. A link's rate stays: the paper's second platform has another link, of which
    table 1 says nothing."""
    return structs.replace(FITTED, hop=hop)


RANKED: Final = with_hop(HOP)
"""The constants with which all of Weaver's figures are played."""


def lost(constants: Constants, batch: int) -> float:
    """Returns the part of the throughput that two instances have more than one model over both GPUs, with as
    many sequences: `batch` a GPU, computed together from the prompt to the last token."""
    return 1.0 - _seconds(constants, 1, batch) / _seconds(constants, 2, 2 * batch)


def _seconds(constants: Constants, gpus: int, sequences: int) -> float:
    unit = Roofline(find_device(DEVICE), gpus, {MODEL: find_shape(MODEL)}, constants)
    steps = (Work.decode(MODEL, 1.0, [PROMPT + n] * sequences) for n in range(1, OUTPUT))
    return unit.seconds(Work.prefill(MODEL, 1.0, [PROMPT] * sequences)) + sum(map(unit.seconds, steps))


def most_lost(constants: Constants) -> float:
    """Returns the most that is lost, over all batches."""
    return max(lost(constants, batch) for batch in BATCHES)


def fitted_hop() -> float:
    """Returns the seconds of an all-reduce by which table 1 is met, to three digits."""
    low, high = FITTED.hop, 10 * FITTED.hop
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if most_lost(with_hop(middle)) < MOST_LOST else (low, middle)
    return float(f"{high:.3g}")


def table_1(scale: Scale, tell: Tell) -> Report:
    """Computes what is lost by both sets of constants; nothing is played."""
    tell("table 1", 0.0)
    before = {batch: lost(FITTED, batch) for batch in BATCHES}
    after = {batch: lost(RANKED, batch) for batch in BATCHES}
    found: list[Cell] = cells(
        "the most over all batches",
        ("% lost, fitted to MuxServe's profile", 100 * MOST_LOST, 100 * max(before.values())),
        ("% lost, fitted to the paper's number", None, 100 * max(after.values())),
    )
    return Report(
        name="table 1",
        title="throughput that is lost by tensor parallelism over two A100-40, 1,024 tokens in, 128 out",
        cells=tuple(found),
        claims=(
            Claim(
                said="two instances answer more than one over both GPUs, without the fit",
                holds=min(before.values()) > 0,
                found=f"one loses {100 * min(before.values()):.0f} to {100 * max(before.values()):.0f} %",
            ),
        ),
        grids=(
            Grid(
                title="% lost by sequences a GPU",
                heads=("seconds of an all-reduce", *map(str, BATCHES)),
                rows=(
                    (f"{1e6 * FITTED.hop:.0f} µs, fitted to MuxServe's profile", *_percent(before)),
                    (f"{1e6 * HOP:.0f} µs, fitted to table 1", *_percent(after)),
                ),
            ),
        ),
    )


def _percent(parts: dict[int, float]) -> list[str]:
    return [f"{100 * part:.1f}" for part in parts.values()]
