"""Fit the roofline's constants to the A100 profile published with MuxServe, and say how far off it is.

python -m tools.fit_cost_model PROFILE.csv

The profile has a row for each model, GPUs, percentage of the multiprocessors, batch and length, with the
milliseconds of a prefill of `batch` prompts of that length, and of a decode step after it; −1 was not
measured. Prints the constants for src/kvloom/plan/cost/devices.py, and tables for docs/cost-model.md: of all
rows, of rows that a fit has not seen, and of other latencies that were published.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from tools.published_latencies import published

from kvloom.plan.cost.devices import FITTED, Constants, find_device
from kvloom.plan.cost.fit import Spread
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import SHAPES
from kvloom.plan.cost.work import Work
from kvloom.types.geometry import F64
from kvloom.types.job import Phase

DEVICE: Final = "A100-80"
COLUMNS: Final = {Phase.PREFILL: "prefill_ms", Phase.DECODE: "decode_ms"}
SET: Final = ("bandwidth", "attention", "poll")  # which the data cannot tell from the others
FREE: Final = tuple(name for name in Constants.__struct_fields__ if name not in SET)
SEED: Final = 4

# Tokens of a prefill, sequences of a decode step: from here on.
REGIONS: Final[dict[Phase, dict[str, int]]] = {
    Phase.PREFILL: {"to 256 tokens": 0, "to 2,048": 257, "to 32,768": 2049, "more": 32769},
    Phase.DECODE: {"to 32 sequences": 0, "to 256": 33, "more": 257},
}


@dataclass(frozen=True, slots=True)
class Row:
    gpus: int
    work: Work
    seconds: float

    @property
    def region(self) -> str:
        size = self.work.tokens
        return max((begin, name) for name, begin in REGIONS[self.work.phase].items() if begin <= size)[1]


def read_rows(file: Path) -> list[Row]:
    """What was measured, prefill and decode as rows of their own."""
    out = []
    with file.open(newline="") as lines:
        for line in csv.DictReader(lines):
            model, share = line["model"], int(line["sm_percent"]) / 100
            lengths = [int(line["sequence_length"])] * int(line["batch_size"])
            for phase, column in COLUMNS.items():
                milliseconds = float(line[column])
                if milliseconds > 0:
                    make = Work.prefill if phase is Phase.PREFILL else Work.decode
                    out.append(Row(int(line["gpus"]), make(model, share, lengths), milliseconds / 1e3))
    return out


def predict(rows: Sequence[Row], constants: Constants) -> F64:
    device = find_device(DEVICE)
    units = {gpus: Roofline(device, gpus, SHAPES, constants) for gpus in {row.gpus for row in rows}}
    return np.array([units[row.gpus].seconds(row.work) for row in rows])


_EASY: Final = 0.05  # errors beyond it count by their size, not its square: outliers do not decide
_STEP: Final = 1e-4  # of a logarithm, for slopes
_MOST: Final = 0.5  # that a logarithm moves at once

Predict = Callable[[F64], F64]  # constants [C] → seconds [R]


def fit_log(predict: Predict, seconds: F64, start: F64, *, rounds: int = 100) -> F64:
    """Returns the positive constants [C], from `start`, for which predict(constants) comes nearest to seconds
    [R]: by the logarithm of their ratio, after Levenberg (1944) and Marquardt (1963), with weights that tame
    outliers."""
    point, damping = np.log(start), 1e-2
    wrong = _wrong(predict, point, seconds)
    for _ in range(rounds):
        slopes = _slopes(predict, point, seconds, wrong)
        weights = 1.0 / np.sqrt(wrong**2 + _EASY**2)
        curve, down = slopes.T @ (slopes * weights[:, None]), slopes.T @ (weights * wrong)
        better = None
        while better is None and damping < 1e9:
            steps = np.linalg.solve(curve + damping * np.diag(np.diag(curve) + 1e-9), -down)
            moved = point + np.clip(steps, -_MOST, _MOST)
            then = _wrong(predict, moved, seconds)
            if _loss(then) < _loss(wrong):
                better = then
            else:
                damping *= 4.0
        if better is None:
            break
        gained = 1.0 - _loss(better) / _loss(wrong)
        point, wrong, damping = moved, better, max(damping / 3.0, 1e-9)
        if gained < 1e-7:
            break
    return np.exp(point)


def _wrong(predict: Predict, point: F64, seconds: F64) -> F64:
    wrong: F64 = np.log(predict(np.exp(point)) / seconds)
    return wrong


def _slopes(predict: Predict, point: F64, seconds: F64, wrong: F64) -> F64:
    """Returns [R, C]: how each error changes with each logarithm."""
    slopes = np.empty((len(wrong), len(point)))
    for i in range(len(point)):
        moved = point.copy()
        moved[i] += _STEP
        slopes[:, i] = (_wrong(predict, moved, seconds) - wrong) / _STEP
    return slopes


def _loss(wrong: F64) -> float:
    return float(np.sum(np.sqrt(wrong**2 + _EASY**2) - _EASY))


def fit(rows: Sequence[Row], start: Constants = FITTED, *, rounds: int = 100) -> Constants:
    def seconds(values: F64) -> F64:
        return predict(rows, _with(start, values))

    measured = np.array([row.seconds for row in rows])
    first = np.array([getattr(start, name) for name in FREE])
    return _with(start, fit_log(seconds, measured, first, rounds=rounds))


def _with(constants: Constants, values: F64) -> Constants:
    return msgspec.structs.replace(constants, **dict(zip(FREE, values.tolist(), strict=True)))


def held_out(rows: Sequence[Row]) -> dict[str, Callable[[Row], bool]]:
    """What each check keeps from its fit."""
    drawn = random.Random(SEED)
    half = {id(row): drawn.random() < 0.5 for row in rows}
    models = sorted({row.work.model for row in rows})
    out: dict[str, Callable[[Row], bool]] = {
        model: lambda row, model=model: row.work.model == model  # type: ignore[misc]
        for model in models
    }
    return out | {"random half": lambda row: half[id(row)]}


def spreads(rows: Sequence[Row], constants: Constants) -> dict[str, Spread]:
    """Of all, and by phase, region and model."""
    predicted = predict(rows, constants)
    groups: dict[str, list[int]] = {}
    for i, row in sorted(enumerate(rows), key=lambda one: (one[1].work.phase, one[1].work.tokens)):
        phase = row.work.phase.value
        for key in ("all", phase, f"{phase}, {row.region}", f"{phase}, {row.work.model}"):
            groups.setdefault(key, []).append(i)
    measured = [row.seconds for row in rows]
    return {key: _spread(predicted, measured, chosen) for key, chosen in groups.items()}


def published_spreads(constants: Constants = FITTED) -> dict[str, Spread]:
    """Of latencies that no fit has seen, by source and device."""
    rows = published()
    units = {
        (row.device, row.gpus): Roofline(find_device(row.device), row.gpus, SHAPES, constants) for row in rows
    }
    predicted = [1e3 * units[row.device, row.gpus].seconds(row.work) for row in rows]
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(f"{row.source}: {row.work.model}, {row.gpus} × {row.device}", []).append(i)
    measured = [row.milliseconds for row in rows]
    return {key: _spread(predicted, measured, chosen) for key, chosen in groups.items()}


def _spread(predicted: Sequence[float] | F64, measured: Sequence[float], chosen: Sequence[int]) -> Spread:
    return Spread.of([predicted[i] for i in chosen], [measured[i] for i in chosen])


def table(found: Mapping[str, Spread]) -> str:
    lines = ["| | rows | median error | P90 | bias |", "|---|---|---|---|---|"]
    for key, spread in found.items():
        numbers = f"{spread.median:.1%} | {spread.p90:.1%} | {spread.bias:+.1%}"
        lines.append(f"| {key} | {spread.rows:,} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("profile", type=Path, metavar="PROFILE.csv")
    rows = read_rows(parser.parse_args().profile)
    fitted = fit(rows)
    print("constants, fitted to all rows:")
    for name in FREE:
        print(f"    {name}={float(f'{getattr(fitted, name):.3g}')!r},")
    print(f"\n{table(spreads(rows, fitted))}")
    for name, unseen in held_out(rows).items():
        print(f"... fitting without {name}", file=sys.stderr)
        constants = fit([row for row in rows if not unseen(row)])
        kept = [row for row in rows if unseen(row)]
        print(f"\nunseen: {name}\n\n{table(spreads(kept, constants))}")
    print(f"\npublished elsewhere\n\n{table(published_spreads(fitted))}")


if __name__ == "__main__":
    main()
