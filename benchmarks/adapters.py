"""Requests of many adapters in one batch, against the base's own requests alone.

python -m benchmarks.adapters [--shape A] [--rank 16] [--adapters 64] [--rows 32] [--rounds 15]. Adapters
have random weights in bfloat16 for all seven linear layers of each layer; the base is in float32. The sides
are the same rows over the same pages, step by step in turn, so that neighbours on the machine slow all of
them: those of the base, those of one adapter, and those of as many adapters as there are rows, which go round
all adapters from step to step. Then one request alone, and the prefill of a prompt. Forwards alone, without
the engine's loop. Medians of the rounds.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from tools.make_checkpoint import BYTES, SHAPES

from benchmarks.places import checkpoint
from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from kvloom.exec.adapters import Adapter, LayerName
from kvloom.exec.attention import ForwardState
from kvloom.exec.cpu.adapted import ServedAdapters
from kvloom.exec.cpu.executor import CPU
from kvloom.exec.loader import load_model
from kvloom.kv.arena import Arena
from kvloom.kv.pool import Pool
from kvloom.types.geometry import I64
from kvloom.types.spec import ModelSpec

BLOCK = 1 << 14
CONTEXT = 32
MANY, ONE = 75.0, 90.0  # per cent of the base's own tokens a second, at least


@dataclass(frozen=True, slots=True)
class Effort:
    rank: int = 16
    adapters: int = 64
    rows: int = 32
    prompt: int = 512
    rounds: int = 15


QUICK: Final = Effort(adapters=4, rows=4, prompt=64, rounds=1)


class Rows:
    """Rows of a model with adapters, over a pool of their own."""

    def __init__(self, shape: str, effort: Effort) -> None:
        path = checkpoint(shape, "bfloat16")
        self._model: Any = load_model(ModelSpec(name="m", path=str(path), dtype="float32"), BLOCK, CPU)
        forward: Any = self._model.forward
        shapes: Mapping[LayerName, tuple[int, int]] = forward.shapes
        self.served, self.names = ServedAdapters(shapes), [str(i) for i in range(effort.adapters)]
        generator = torch.Generator().manual_seed(0)
        for name in self.names:
            weights = {
                place: (
                    (0.01 * torch.randn(effort.rank, inputs, generator=generator)).bfloat16(),
                    (0.01 * torch.randn(outputs, effort.rank, generator=generator)).bfloat16(),
                )
                for place, (outputs, inputs) in shapes.items()
            }
            self.served.put(name, Adapter(effort.rank, 1.0, weights))
        self._random = np.random.default_rng(0)

    def begin(self, rows: int, tokens: int) -> None:
        """Makes room for rows of so many tokens each."""
        geometry = self._model.geometry
        arena = Arena(rows * geometry.blocks(tokens), BLOCK)
        self._view = arena.view(geometry.head_dim, self._model.kv_dtype)
        pool = Pool(arena.blocks, {"m": geometry}, max_sequences=rows, max_tokens={"m": tokens})
        self._cache = pool.caches["m"]
        for row in range(rows):
            self._cache.add_sequence(row)

    def append(self, rows: Sequence[int], count: int, names: Sequence[str]) -> float:
        """Returns the seconds of a forward over `count` new tokens of each row, which have these adapters."""
        appends = [count] * len(rows)
        plan = self._cache.begin_forward(list(rows), appends)
        tokens: I64 = self._random.integers(0, BYTES, sum(appends))
        begun = time.perf_counter()
        with torch.inference_mode():
            adapted = self.served.rows(names, plan.appends)
            kept = np.cumsum(appends) - 1
            self._model.forward(tokens, kept, ForwardState(plan, self._view), adapted)
        took = time.perf_counter() - begun
        self._cache.end_forward(plan)
        return took


BASE, SINGLE, ALL = "the base", "one adapter", "all adapters"


def decode(model: Rows, rows: int, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each side's steps."""
    every = list(range(rows))
    model.begin(rows, CONTEXT + 3 * rounds + 4)
    for row in every:
        model.append([row], CONTEXT, [""])
    took: dict[str, list[float]] = {BASE: [], SINGLE: [], ALL: []}
    for number in range(rounds + 1):
        for side, times in took.items():
            names = [model.names[(number * rows + row) % len(model.names)] for row in every]
            times.append(model.append(every, 1, {BASE: [""] * rows, SINGLE: ["0"] * rows, ALL: names}[side]))
    return {side: times[1:] for side, times in took.items()}


def prefill(model: Rows, tokens: int, rounds: int) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {BASE: [], SINGLE: []}
    for _ in range(rounds + 1):
        for side, times in took.items():
            model.begin(1, tokens)
            times.append(model.append([0], tokens, ["" if side == BASE else "0"]))
    return {side: times[1:] for side, times in took.items()}


def compare(shape: str, effort: Effort) -> dict[str, dict[str, list[float]]]:
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # of the calling thread
    model = Rows(shape, effort)
    return {
        f"decode, {effort.rows} requests": decode(model, effort.rows, effort.rounds),
        "decode, 1 request": decode(model, 1, effort.rounds),
        f"prefill, {effort.prompt} tokens": prefill(model, effort.prompt, max(1, effort.rounds // 3)),
    }


async def measure(shape: str, effort: Effort) -> Report:
    machine = this_machine()
    found = await asyncio.to_thread(compare, shape, effort)
    rows: list[list[Cell]] = []
    findings = []
    for what, sides in found.items():
        rows.append(
            [what, *(1e3 * median(sides[side]) if side in sides else None for side in (BASE, SINGLE, ALL))]
        )
        for side, least in ((SINGLE, ONE), (ALL, MANY)):
            if side in sides:
                share = 100 * median(sides[BASE]) / median(sides[side])
                findings.append(
                    Finding(what=f"{what}: {side}, of the base's rate", value=share, unit=" %", least=least)
                )
    return Report(
        name="adapters",
        title=f"Shape {shape} with {effort.adapters} adapters of rank {effort.rank} (ms a forward)",
        columns=["", BASE, SINGLE, ALL],
        rows=rows,
        findings=findings,
        machine=machine,
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="A")
    parser.add_argument("--rank", type=int, default=Effort().rank)
    parser.add_argument("--adapters", type=int, default=Effort().adapters)
    parser.add_argument("--rows", type=int, default=Effort().rows)
    parser.add_argument("--rounds", type=int, default=Effort().rounds)
    options = parser.parse_args()
    effort = Effort(options.rank, options.adapters, options.rows, rounds=options.rounds)
    publish(asyncio.run(measure(options.shape, effort)))


if __name__ == "__main__":
    main()
