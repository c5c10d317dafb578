"""Mixed jobs against their parts: how the cost model foretells them.

python -m benchmarks.mixed_jobs [--shape B] [--threads 2] [--repeats 9]. The real executor in float32 runs, on
all cores and with nothing beside, a prefill of one prompt, a decode step of sequences that hold 150 tokens on
average, and the mixed job of both. By the cost model this takes as long as its parts one after the other,
less a decode step of one sequence that holds nothing, times a factor (`ProfiledCostModel`). "Of that" is what
it took as a part of that without the factor, and "as tokens" as a part of what a prefill of so many more
tokens took.
"""

from __future__ import annotations

import asyncio
from statistics import median
from typing import Final

import uvloop

from benchmarks.engines import MODEL, spec_of
from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from kvloom.exec.cpu.executor import load_executor
from kvloom.kv.memory import keep_freed_memory
from kvloom.lab.profile.jobs import JobRunner, Setting, decode, mixed, prefill
from kvloom.types.job import Phase

DECODES: Final = (8, 30, 60, 110)
PROMPTS: Final = (100, 200, 512)
HELD: Final = 150
WITHIN: Final = 0.15


async def measure(shape: str, threads: int, repeats: int) -> Report:
    executor = load_executor(spec_of(shape, "unit", kv_bytes=1 << 30, threads=threads))
    keep_freed_memory()
    runner = JobRunner(executor, temperature=0.0)

    async def seconds(setting: Setting) -> float:
        with runner.placed(setting) as ids:
            await runner.run(setting, ids)
            return median([await runner.run(setting, ids) for _ in range(repeats)])

    empty = await seconds(Setting(MODEL, Phase.DECODE, threads, (0,), (1,)))
    rows, worst = list[list[Cell]](), 0.0
    for decodes in DECODES:
        decoding = decode(MODEL, threads, decodes, HELD)
        step = await seconds(decoding)
        for tokens in PROMPTS:
            alone = await seconds(prefill(MODEL, threads, 1, tokens))
            more = await seconds(prefill(MODEL, threads, 1, tokens + decodes))
            both = await seconds(mixed(MODEL, threads, decodes, HELD, tokens))
            ratio = both / (alone + step - empty)
            worst = max(worst, abs(ratio - 1.0))
            name = f"{decodes} decodes, {tokens} tokens"
            rows.append([name, 1e3 * both, 1e3 * alone, 1e3 * step, ratio, both / more])
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
