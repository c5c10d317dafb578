"""The time for which a request that moves has to wait, and the cost of its move to those that stay (section
6.2): figure 10."""

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
from kvloom.lab.sim.fleet import SimulatedFleet, run_fleet
from kvloom.lab.sim.virtual_time import run_virtual
from kvloom.lab.workload.request import Prompts, WorkloadRequest
from kvloom.plan.cost.work import Work
from kvloom.router import Call, Fleet, Frames
from kvloom.router.program import Program, load_program
from kvloom.types.request import SamplingParams, StartGenerate, TokenEvent

LENGTHS: Final = (256, 512, 1024, 2048, 4096, 8192)  # tokens
DOWNTIME: Final = (13, 12, 15, 16, 22, 26)  # ms, the paper's
RECOMPUTED: Final = (58, 110, 220, 436, 940, 1995)
BLOCKING: Final = (68, 129, 226, 451, 909, 1682)
STEPS: Final = (46.80, 44.39, 43.30, 42.85, 42.90, 43.62)  # ms, of a batch of 8,192 tokens in all
MOVING: Final = (47.36, 44.56, 43.99, 43.48, 43.59, 44.18)  # while one of it moves
FLAT: Final = 2.0  # times, from the shortest request to the longest
SLOWER: Final = 0.01  # of a step, while one moves

_BEFORE: Final = 8  # tokens that it has when it is ordered away
_AFTER: Final = 200
_WARM: Final = 16  # steps of a batch before one of it moves: contexts grow
_JUST: Final = 10  # the last of them, with which those during the move are compared
_BATCH: Final = 8192  # tokens that run together


def figure_10(scale: Scale, tell: Tell) -> Report:
    """Moves one request from an instance to another; nothing else is asked."""
    lengths = LENGTHS if scale == "full" else LENGTHS[:3]
    found, stays, told = [], [], list[Cell]()
    for at, length in enumerate(lengths):
        tell(f"{length} tokens", at / len(lengths))
        found.append(downtime(length))
        stays.append(beside(length))
        step, moving = stays[-1]
        told += cells(
            f"{length:,} tokens",
            ("downtime, ms", DOWNTIME[at], found[-1][0] * 1e3),
            ("recomputed, ms", RECOMPUTED[at], _recomputed(length) * 1e3),
            ("a step of 8,192 tokens, ms", STEPS[at], step * 1e3),
            ("while one moves, ms", MOVING[at], moving * 1e3),
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
            Claim(
                said=f"those that stay have steps at most {SLOWER:.0%} longer while one moves",
                holds=all(moving <= (1 + SLOWER) * step for step, moving in stays),
                found=f"{max(moving / step for step, moving in stays) - 1:+.1%} at the most",
            ),
        ),
        grids=(Grid(title="ours, ms", heads=heads, rows=rows),),
    )


def downtime(length: int) -> tuple[float, float]:
    """Returns the seconds for which a request of so many tokens waits longer than for a step, and those of a
    step."""
    units = [replace(unit, max_steps=1) for unit in make_units(2)]
    prompt = Prompts(VOCAB)(0, WorkloadRequest(at=0.0, model=MODEL, prompt=length - _BEFORE, output=1))
    body = StartGenerate(
        model=MODEL,
        request="it",
        prompt=prompt,
        sampling=SamplingParams(max_tokens=_BEFORE + _AFTER, seed=0),
    )

    async def main() -> list[float]:
        async with run_fleet(units, load_program("data_parallel", {})) as fleet:
            return await _moved(fleet, body)

    gaps = [after - before for before, after in pairwise(run_virtual(main()))]
    step = median(gaps)
    return max(gaps) - step, step


async def _to_first(call: Call, fleet: Fleet) -> Frames:
    async for frame in call.start_generate(fleet.replicas[0]):
        yield frame


def beside(length: int) -> tuple[float, float]:
    """Returns the median seconds of a step of a batch of so long requests, before one of them moves to an
    idle instance, and meanwhile. A request of 8,192 tokens is alone, and moves itself."""
    units = [replace(unit, max_steps=1) for unit in make_units(2)]
    count = _BATCH // length
    prompts = Prompts(VOCAB)
    bodies = [
        StartGenerate(
            model=MODEL,
            request=f"it-{at}",
            prompt=prompts(at, WorkloadRequest(at=0.0, model=MODEL, prompt=length - _BEFORE, output=1)),
            sampling=SamplingParams(max_tokens=2 * _AFTER, seed=at),
        )
        for at in range(count)
    ]

    async def main() -> tuple[list[float], float, float]:
        loop, times, warm = asyncio.get_running_loop(), list[float](), asyncio.Event()
        async with (
            run_fleet(units, Program("to the first", _to_first, {})) as fleet,
            asyncio.TaskGroup() as group,
        ):

            async def read(body: StartGenerate, watched: bool) -> None:
                async with aclosing(fleet.router.start_generate(body)) as frames:
                    async for frame in frames:
                        if watched:
                            times.extend(loop.time() for event in frame if isinstance(event, TokenEvent))
                        if len(times) >= _WARM:
                            warm.set()

            reading = [group.create_task(read(body, body is bodies[0])) for body in bodies]
            await warm.wait()
            began = loop.time()
            await fleet.router.move(bodies[-1].request, "gpu-1")
            ended = loop.time()
            for task in reading:
                task.cancel()
        return times, began, ended

    times, began, ended = run_virtual(main())
    gaps = list(pairwise(times))
    before = [after - at for at, after in gaps if after <= began][-_JUST:]
    moving = [after - at for at, after in gaps if at < ended and after > began]
    return median(before), median(moving)


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
