"""A decode step of rows that go on from one prefix: its pages read once for all rows, against once a row.

python -m benchmarks.shared_pages [--shape qwen3-0.6b B] [--rows 32] [--prefix 1000] [--rounds 9]. Both sides
are the same rows over the same pages, step by step in turn, so that neighbours on the machine slow both. The
checkpoint is in bfloat16, served in float32 and as `auto` serves it. Forwards alone, without the engine's
loop. Medians of the rounds.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Final

import numpy as np
import torch
from tools.make_checkpoint import BYTES, SHAPES

from benchmarks.places import checkpoint
from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from kvloom.exec.attention import ForwardState
from kvloom.exec.cpu.executor import CPU
from kvloom.exec.loader import load_model
from kvloom.kv.arena import Arena
from kvloom.kv.pool import Pool
from kvloom.types.geometry import I64
from kvloom.types.spec import Dtype, ModelSpec

BLOCK = 1 << 14
LEAST = 1.3
WANTED: Final = ("qwen3-0.6b", "B")
DTYPES: Final[tuple[Dtype, ...]] = ("float32", "auto")


@dataclass(frozen=True, slots=True)
class Effort:
    rows: int = 32
    prefix: int = 1000
    rounds: int = 9


class Branches:
    """Rows that have one prefix in common, and a token of their own each."""

    def __init__(self, shape: str, dtype: Dtype, effort: Effort) -> None:
        path = checkpoint(shape, "bfloat16")
        self._model = load_model(ModelSpec(name="m", path=str(path), dtype=dtype), BLOCK, CPU)
        geometry, most = self._model.geometry, effort.prefix + 2 * effort.rounds + 4
        own = geometry.pages(most) - effort.prefix // geometry.tokens_per_block
        pages = geometry.pages(most) + effort.rows * own
        arena = Arena(pages * geometry.blocks_per_page, BLOCK)
        self._view = arena.view(geometry.head_dim, self._model.kv_dtype)
        pool = Pool(arena.blocks, {"m": geometry}, max_sequences=effort.rows, max_tokens={"m": most})
        self._cache, self._random = pool.caches["m"], np.random.default_rng(0)
        self._cache.add_sequence(0)
        self._append([0], effort.prefix, True)
        self._rows = list(range(effort.rows))
        for row in self._rows[1:]:
            self._cache.fork_sequence(0, row)

    def step(self, shared: bool) -> float:
        """Returns the milliseconds of a step."""
        return self._append(self._rows, 1, shared)

    def _append(self, rows: list[int], count: int, shared: bool) -> float:
        """Appends `count` tokens to each row, and returns the milliseconds of the forward."""
        plan = self._cache.begin_forward(rows, [count] * len(rows))
        tokens: I64 = self._random.integers(0, BYTES, count * len(rows))
        begun = time.perf_counter()
        state = ForwardState(plan, self._view)
        if not shared:
            state.parts = tuple(replace(part, shared=None) for part in state.parts)
        with torch.inference_mode():
            state.copy_pages(plan.copies)
            self._model.forward(tokens, np.arange(count - 1, len(tokens), count), state)
        took = 1e3 * (time.perf_counter() - begun)
        self._cache.end_forward(plan)
        return took


def compare(shape: str, dtype: Dtype, effort: Effort) -> dict[bool, list[float]]:
    """Returns the milliseconds of steps with the prefix read once (True), and once a row (False)."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # of the calling thread
    branches = Branches(shape, dtype, effort)
    took: dict[bool, list[float]] = {True: [], False: []}
    for shared in took:
        branches.step(shared)  # warms, and copies the page that rows share in part
    for _ in range(effort.rounds):
        for shared, times in took.items():
            times.append(branches.step(shared))
    return took


async def measure(shapes: Sequence[str], effort: Effort) -> Report:
    machine = this_machine()
    rows: list[list[Cell]] = []
    findings = []
    for shape, dtype in product(shapes, DTYPES):
        took = await asyncio.to_thread(compare, shape, dtype, effort)
        once, each = median(took[True]), median(took[False])
        rows.append([f"{shape}, {dtype}", once, each])
        what = f"{shape}, {dtype}: a step with the prefix read once"
        findings.append(Finding(what=what, value=each / once, unit="×", least=LEAST))
    return Report(
        name="shared-pages",
        title=f"A decode step of {effort.rows} rows over one prefix of {effort.prefix} tokens (ms)",
        columns=["", "read once", "read by each row"],
        rows=rows,
        findings=findings,
        machine=machine,
    )


QUICK: Final = Effort(rows=4, prefix=100, rounds=1)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=WANTED)
    parser.add_argument("--rows", type=int, default=Effort().rows)
    parser.add_argument("--prefix", type=int, default=Effort().prefix)
    parser.add_argument("--rounds", type=int, default=Effort().rounds)
    options = parser.parse_args()
    publish(asyncio.run(measure(options.shape, Effort(options.rows, options.prefix, options.rounds))))


if __name__ == "__main__":
    main()
