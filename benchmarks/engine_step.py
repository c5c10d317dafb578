"""The engine's own work between jobs: the real Engine over a device that takes no time.

python -m benchmarks.engine_step. CPU time of the engine's process, so that neighbours on the machine do not
count. `between` is what the device waits for: from a job's end to the next job's start. `whole` adds what
runs while the device works: every event handed to a caller of the stream verb, and the callers' own turn.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from statistics import median

import uvloop

from benchmarks.null_executor import Clockwork, NullExecutor, NullTransport, null_spec
from benchmarks.report import Finding, Report, make_parser, publish, this_machine
from kvloom.engine.engine import Engine
from kvloom.types.clock import WallClock
from kvloom.types.request import SamplingParams, StartGenerate

FLEETS = {1: {"a1": "A"}, 3: {"a1": "A", "b1": "B", "b2": "B"}}
BLOCKS = 1 << 18
PATIENCE = 300.0
PROMPT, MOST_MS = 128, 1.0
STREAMED, WHOLE = 1, 1024  # tokens a frame


@dataclass(frozen=True, slots=True)
class Step:
    """Milliseconds of CPU a decode step."""

    between: float
    between_p99: float
    whole: float


async def measure_steps(models: int, sequences: int, steps: int, interval: int) -> Step:
    """`steps` steps with all sequences running, shared evenly among the models."""
    shapes, clockwork = FLEETS[models], Clockwork(sequences, steps)
    executor = NullExecutor(shapes, blocks=BLOCKS, compute=2, clockwork=clockwork)
    engine = Engine(executor, NullTransport(), null_spec(shapes, blocks=BLOCKS), WallClock())
    names = list(shapes)
    output = 4 * sequences + 2 * steps  # the early ones have work still when all have joined
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        calls = [_call(engine, _body(names[i % models], i, output, interval)) for i in range(sequences)]
        await asyncio.wait_for(asyncio.gather(*calls), PATIENCE)
        engine.stop()
    engine.pool.check()
    gaps = sorted(clockwork.gaps)
    return Step(1e3 * median(gaps), 1e3 * gaps[int(len(gaps) * 0.99)], 1e3 * clockwork.work / len(gaps))


def _body(model: str, number: int, output: int, interval: int) -> StartGenerate:
    return StartGenerate(
        model=model,
        request=f"r{number}",
        prompt=[300 + number] * PROMPT,
        sampling=SamplingParams(max_tokens=output, seed=number),
        interval=interval,
    )


async def _call(engine: Engine, body: StartGenerate) -> None:
    async with aclosing(engine.start_generate(body)) as frames:
        async for _ in frames:
            pass


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    publish(measure(options.sequences, options.steps))


def measure(sequences: int = 64, steps: int = 1000) -> Report:
    rows: list[list[str | int | float | None]] = []
    findings = []
    for models in FLEETS:
        for interval, told in ((STREAMED, "each token sent"), (WHOLE, "sent at the end")):
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                step = runner.run(measure_steps(models, sequences, steps, interval))
            rows.append([f"{models} model(s), {told}", step.between, step.between_p99, step.whole])
            findings.append(
                Finding(
                    what=f"work a step, {models} model(s), {told}", value=step.whole, unit=" ms", most=MOST_MS
                )
            )
    return Report(
        name="engine-step",
        title=f"The engine's own work a step, {sequences} sequences running (ms of CPU)",
        columns=["", "between jobs", "p99", "in all"],
        rows=rows,
        findings=findings,
        machine=this_machine(),
    )


if __name__ == "__main__":
    main()
