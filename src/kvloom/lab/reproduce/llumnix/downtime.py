"""How long a request that moves has to wait (section 6.2): figure 10."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Final

from kvloom.lab.reproduce.llumnix.setup import LINK, MODEL, make_units
from kvloom.lab.reproduce.report import Cell, Claim, Grid, Report, Scale, Tell, cells
from kvloom.lab.reproduce.setup import VOCAB
from kvloom.lab.sim.fleet import SimulatedFleet, simulated
from kvloom.lab.sim.virtual_time import run_virtual
from kvloom.lab.workload.request import Prompts, WorkloadRequest
from kvloom.plan.cost.work import Work
from kvloom.router.program import load_program
from kvloom.types.request import SamplingParams, StartGenerate, TokenEvent

LENGTHS: Final = (256, 512, 1024, 2048, 4096, 8192)  # tokens
DOWNTIME: Final = (13, 12, 15, 16, 22, 26)  # ms, the paper's
RECOMPUTED: Final = (58, 110, 220, 436, 940, 1995)
BLOCKING: Final = (68, 129, 226, 451, 909, 1682)
FLAT: Final = 2.0  # times, from the shortest request to the longest

_BEFORE: Final = 8  # tokens that it has when it is ordered away
_AFTER: Final = 200


def figure_10(scale: Scale, tell: Tell) -> Report:
    """Moves one request from an instance to another; nothing else is asked."""
    lengths = LENGTHS if scale == "full" else LENGTHS[:3]
    found, told = [], list[Cell]()
    for at, length in enumerate(lengths):
        tell(f"{length} tokens", at / len(lengths))
        found.append(downtime(length))
        told += cells(
            f"{length:,} tokens",
            ("downtime, ms", DOWNTIME[at], found[-1][0] * 1e3),
            ("recomputed, ms", RECOMPUTED[at], _recomputed(length) * 1e3),
        )
    waits, steps = [wait for wait, _ in found], [step for _, step in found]
    rows = tuple(
        (f"{length:,}", f"{wait * 1e3:.1f}", f"{step * 1e3:.1f}", f"{_copied(length) * 1e3:.0f}", str(paper))
        for length, wait, step, paper in zip(lengths, waits, steps, BLOCKING, strict=False)
    )
    heads = ("tokens", "downtime", "a decode step", "a blocking copy", "in the paper")
    return Report(
        name="figure 10",
        title="the downtime of a request that moves, LLaMA-7B",
        cells=tuple(told),
        claims=(
            Claim(
                said="downtime is about the same whatever the length",
                holds=max(waits) <= FLAT * min(waits),
                found=f"{min(waits) * 1e3:.1f} to {max(waits) * 1e3:.1f} ms",
            ),
            Claim(
                said="it is shorter than a decode step",
                holds=all(wait < step for wait, step in found),
                found=f"{max(wait / step for wait, step in found):.2f} steps at the most",
            ),
        ),
        grids=(Grid(title="ours, ms", heads=heads, rows=rows),),
    )


def downtime(length: int) -> tuple[float, float]:
    """Returns the seconds for which a request of so many tokens waits longer than for a step, and those of a
    step."""
    units = [replace(unit, stride=1) for unit in make_units(2)]
    prompt = Prompts(VOCAB)(0, WorkloadRequest(at=0.0, model=MODEL, prompt=length - _BEFORE, output=1))
    body = StartGenerate(
        model=MODEL,
        request="it",
        prompt=prompt,
        sampling=SamplingParams(max_tokens=_BEFORE + _AFTER, seed=0),
    )

    async def main() -> list[float]:
        async with simulated(units, load_program("data_parallel", {})) as fleet:
            return await _moved(fleet, body)

    gaps = [after - before for before, after in pairwise(run_virtual(main()))]
    step = median(gaps)
    return max(gaps) - step, step


async def _moved(fleet: SimulatedFleet, body: StartGenerate) -> list[float]:
    """Returns when its tokens came."""
    loop, times = asyncio.get_running_loop(), list[float]()
    async with asyncio.TaskGroup() as group, aclosing(fleet.router.start_generate(body)) as frames:
        async for frame in frames:
            times += [loop.time() for event in frame if isinstance(event, TokenEvent)]
            if len(times) == _BEFORE:
                group.create_task(fleet.router.move(body.request, "gpu-1"))
    return times


def _recomputed(length: int) -> float:
    return make_units(1)[0].cost.seconds(Work.prefill(MODEL, 1.0, [length]))


def _copied(length: int) -> float:
    unit = make_units(1)[0]
    return length * unit.shapes[MODEL].kv_bytes / LINK
