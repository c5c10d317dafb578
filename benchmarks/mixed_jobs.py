"""Mixed jobs against their parts: how the cost model foretells them.

python -m benchmarks.mixed_jobs [--shape B] [--threads 2] [--repeats 9]. The real executor in float32 runs, on
all cores and with nothing beside, a prefill of one prompt, a decode step of sequences that hold 150 tokens,
and the mixed job of both. The cost model says that this takes as long as its parts one after the other, less
a decode step of one sequence that holds nothing (`Measured`). "Of that" is what it took as a part of that
sum, and "as tokens" as a part of what a prefill of so many more tokens took.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median
from typing import Final

import numpy as np
import uvloop

from benchmarks.engines import MODEL, spec_of
from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from kvloom.exec.cpu.executor import load_executor
from kvloom.kv.memory import keep_freed_memory
from kvloom.lab.profile.jobs import Setting, Stage
from kvloom.types.job import Job, Phase, SampleRow
from kvloom.types.request import SamplingParams

DECODES: Final = (8, 30, 60, 110)
PROMPTS: Final = (100, 200, 512)
HELD: Final = 150
WITHIN: Final = 0.15


async def measure(shape: str, threads: int, repeats: int) -> Report:
    spec = spec_of(shape, "unit", kv_bytes=1 << 30, threads=threads)
    executor = load_executor(spec)
    keep_freed_memory()
    stage = Stage(executor, temperature=0.0)
    params = SamplingParams(max_tokens=1, seed=0, temperature=0.0)

    async def seconds(decodes: int, held: int, prompt: int) -> float:
        """Returns the median seconds of a job of so many sequences that hold `held` tokens each, and of a
        prompt of so many tokens; 0 for none."""
        rows = decodes if decodes and prompt else 0
        phase = Phase.MIXED if rows else Phase.PREFILL if prompt else Phase.DECODE
        starts, appends = [held] * decodes, [1] * decodes
        if prompt:
            starts, appends = [*starts, 0], [*appends, prompt]
        setting = Setting(MODEL, phase, threads, tuple(starts), tuple(appends))
        cache, took = stage.pool.caches[MODEL], list[float]()
        with stage.placed(setting) as ids:
            for _ in range(repeats + 1):
                plan = cache.begin_forward(ids, appends)
                tokens = np.arange(int(plan.appends.sum())) % 1000
                ends = (np.cumsum(plan.appends) - 1).tolist()
                samples = tuple(
                    SampleRow(row=end, key=number, index=0, params=params)
                    for number, end in zip(ids, ends, strict=True)
                )
                began = time.perf_counter()
                await executor.launch(Job(MODEL, phase, threads, plan, tokens, samples, rows=rows))
                took.append(time.perf_counter() - began)
                cache.abort_forward(plan)
        return median(took[1:])

    empty, rows, worst = await seconds(1, 0, 0), list[list[Cell]](), 0.0
    for decodes in DECODES:
        step = await seconds(decodes, HELD, 0)
        for prompt in PROMPTS:
            prefill, more = await seconds(0, 0, prompt), await seconds(0, 0, prompt + decodes)
            mixed = await seconds(decodes, HELD, prompt)
            ratio = mixed / (prefill + step - empty)
            worst = max(worst, abs(ratio - 1.0))
            name = f"{decodes} decodes, {prompt} tokens"
            rows.append([name, 1e3 * mixed, 1e3 * prefill, 1e3 * step, ratio, mixed / more])
    executor.close()
    return Report(
        name="mixed_jobs",
        title=f"Mixed jobs of shape {shape} and their parts, milliseconds",
        columns=["", "mixed", "prefill", "step", "of that", "as tokens"],
        rows=rows,
        findings=[Finding(what="furthest from the sum of its parts", value=worst, most=WITHIN)],
        machine=this_machine(),
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="B")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        publish(runner.run(measure(options.shape, options.threads, options.repeats)))


if __name__ == "__main__":
    main()
