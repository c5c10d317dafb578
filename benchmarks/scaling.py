"""How the engine's and the gateway's own work grows: with models, requests, units and contexts.

python -m benchmarks.scaling [--quick] [--of models waiting units context]. One thing grows at a time, the
others stay small. `step` is the CPU of the engine's process for a step (one job), over a device that takes no
time; no token is sent in it but at the end. `token` is the CPU of the real gateway's process for a streamed
token, a request's own part included; `memory` is its peak; `rest` is its CPU for a second without requests.
The engines behind it are all in one process and answer at once, unless requests are to wait. Writes
build/bench/scaling.svg beside the table.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import uvloop
from msgspec import structs
from rich.console import Console

from benchmarks.load import Load
from benchmarks.null_engine import Shape
from benchmarks.null_executor import Clockwork, NullExecutor, NullTransport, null_spec
from benchmarks.places import BENCH
from benchmarks.procfs import cpu_seconds, peak_memory
from benchmarks.report import Finding, Report, make_parser, publish, this_machine
from benchmarks.streaming import front
from benchmarks.workload import Ask
from kvloom.engine.engine import Engine
from kvloom.types.clock import WallClock
from kvloom.types.request import SamplingParams, StartGenerate

Kind = Literal["models", "waiting", "units", "context"]
Measure = Literal["step", "token", "memory", "rest"]

TOLD: dict[Kind, str] = {
    "models": "models on a unit",
    "waiting": "requests waiting",
    "units": "units",
    "context": "tokens of a context",
}
COLUMNS: dict[Measure, str] = {
    "step": "step, ms",
    "token": "token, µs",
    "memory": "memory, MiB",
    "rest": "rest, ms/s",
}
FLAT, LINEAR = 0.15, 1.1  # most of an exponent by which a cost grows with what grows
MOST: dict[tuple[Kind, Measure], float] = {
    ("models", "step"): FLAT,
    ("waiting", "step"): FLAT,
    ("models", "token"): FLAT,
    ("units", "token"): FLAT,
}
"""What need not grow; everything else may grow linearly."""

PATIENCE = 540.0
PROMPT = 128
RUNNING = 64
BLOCKS = 1 << 20
WAITING_TOKENS, WAITING_PERIOD = 8, 0.2  # of each stream; seconds between two tokens
WAITING_PACE = 500.0  # requests a second


@dataclass(frozen=True, slots=True)
class Effort:
    sizes: dict[Kind, Sequence[int]]
    steps: int
    """Steps of the engine that are timed."""
    tokens: int
    """Tokens of each stream."""
    rest: float
    """Seconds for which the gateway is watched at rest."""


FULL = Effort(
    {
        "models": (1, 10, 50, 200),
        "waiting": (10, 100, 1_000, 10_000),
        "units": (1, 4, 16, 64),
        "context": (1_000, 4_000, 16_000, 32_000),
    },
    steps=1000,
    tokens=200,
    rest=5.0,
)
QUICK = Effort(
    {"models": (1, 3), "waiting": (10, 100), "units": (1, 3), "context": (500, 1_000)},
    steps=50,
    tokens=20,
    rest=0.5,
)


@dataclass(frozen=True, slots=True)
class Point:
    """One size of what grows, and what it costs. `step` is None if the engine does not see what grows."""

    kind: Kind
    size: int
    step: float | None
    token: float
    memory: float
    rest: float


def engine_step(kind: Kind, size: int, steps: int) -> float | None:
    """Returns milliseconds of CPU a step."""
    if kind == "units":
        return None
    models = size if kind == "models" else 1
    waiting = size if kind == "waiting" else 0
    context = size if kind == "context" else PROMPT
    running = models if kind == "models" else 16 if kind == "context" else RUNNING
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_engine_step(models, running, waiting, context, steps))


async def _engine_step(models: int, running: int, waiting: int, context: int, steps: int) -> float:
    shapes = {f"m{i}": "B" for i in range(models)}
    clockwork = Clockwork(running, steps)
    output = running * (8 + context // 128) + 2 * steps * models  # the early ones run until all are timed
    executor = NullExecutor(shapes, blocks=BLOCKS, compute=2, clockwork=clockwork, context=context + output)
    spec = structs.replace(null_spec(shapes, blocks=BLOCKS), max_running=running)
    engine = Engine(executor, NullTransport(), spec, WallClock())
    names = list(shapes)
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        calls = [
            group.create_task(_call(engine, _body(names[i % models], i, context, output)))
            for i in range(running + waiting)
        ]
        async with asyncio.timeout(PATIENCE):
            await clockwork.done.wait()
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        engine.stop()
    engine.pool.check()
    return 1e3 * clockwork.work / len(clockwork.gaps)


def _body(model: str, number: int, prompt: int, output: int) -> StartGenerate:
    return StartGenerate(
        model=model,
        request=f"r{number}",
        prompt=[300 + number % 4096] * prompt,
        sampling=SamplingParams(max_tokens=output, seed=number),
        interval=output,
    )


async def _call(engine: Engine, body: StartGenerate) -> None:
    async with aclosing(engine.start_generate(body)) as frames:
        async for _ in frames:
            pass


async def gateway(kind: Kind, size: int, effort: Effort) -> tuple[float, float, float]:
    """Returns microseconds of CPU a token, the peak of memory in MiB, and milliseconds of CPU a second at
    rest."""
    context = size if kind == "context" else PROMPT
    tokens, period, pace = effort.tokens, 0.0, math.inf
    if kind == "waiting":  # few tokens, and slow ones, so that all of the requests are there before they end
        tokens, period, pace = WAITING_TOKENS, WAITING_PERIOD, WAITING_PACE
    shape = Shape(
        units=size if kind == "units" else 1,
        models=size if kind == "models" else 1,
        context=context + tokens,
    )
    draw, count = random.Random(size), size if kind == "waiting" else RUNNING
    asks = [
        Ask(
            shape.names[0],  # streams of several models share fewer frames, however many there are
            [draw.randrange(300, 8192) for _ in range(context)],
            tokens,
            i / pace,
        )
        for i in range(count)
    ]
    async with front(period, shape) as here:
        load = Load(dict.fromkeys(shape.names, here.url), stream=True)
        await load.drive([Ask(name, [300] * 8, 2) for name in shape.names])  # what is made once for a model
        idle = await _cpu(here.gateway_pid, lambda: asyncio.sleep(effort.rest))
        outcomes = []

        async def drive() -> None:
            outcomes.extend((await load.drive(asks))[0])

        busy = await _cpu(here.gateway_pid, drive)
        peak = peak_memory(here.gateway_pid)
    failed = [outcome.error for outcome in outcomes if outcome.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(asks)} requests failed: {failed[0]}")
    return 1e6 * busy / sum(ask.output for ask in asks), peak, 1e3 * idle / effort.rest


async def _cpu(pid: int, during: Callable[[], Awaitable[None]]) -> float:
    """Returns seconds of CPU that the process takes meanwhile."""
    before = cpu_seconds(pid)
    await during()
    return cpu_seconds(pid) - before


def exponent(points: Sequence[Point], measure: Measure) -> float | None:
    """Returns the power of the size by which the cost grows from the first point to the last; None if it was
    not measured, or is too little to tell."""
    first, last = (getattr(points[i], measure) for i in (0, -1))
    if not first or not last:
        return None
    return math.log(last / first) / math.log(points[-1].size / points[0].size)


async def measure(effort: Effort, kinds: Sequence[Kind], console: Console) -> Report:
    machine, points = this_machine(), list[Point]()
    for kind in kinds:
        for size in effort.sizes[kind]:
            console.print(f"scaling: {size:,} {TOLD[kind]}", style="dim")
            step = await asyncio.to_thread(engine_step, kind, size, effort.steps)
            points.append(Point(kind, size, step, *await gateway(kind, size, effort)))
    findings = []
    for kind in kinds:
        found = [point for point in points if point.kind == kind]
        for told in COLUMNS:
            power = exponent(found, told)
            if power is not None:
                what = f"{told}: exponent of growth with {TOLD[kind]}"
                findings.append(Finding(what=what, value=power, most=MOST.get((kind, told), LINEAR)))
    picture(points, BENCH / "scaling.svg")
    return Report(
        name="scaling",
        title="Own work as one thing grows, the others small",
        columns=["", "size", *COLUMNS.values()],
        rows=[[TOLD[one.kind], one.size, one.step, one.token, one.memory, one.rest] for one in points],
        findings=findings,
        machine=machine,
    )


def picture(points: Sequence[Point], path: Path) -> None:
    """Draws each cost over each size, both logarithmic."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (no other benchmark draws)

    figure = Figure(figsize=(10, 7), layout="constrained")
    for axes, told in zip(figure.subplots(2, 2).flat, COLUMNS, strict=True):
        for kind in dict.fromkeys(point.kind for point in points):
            found = [point for point in points if point.kind == kind and getattr(point, told)]
            costs = [getattr(point, told) for point in found]
            if costs:
                axes.plot([point.size for point in found], costs, marker="o", label=TOLD[kind])
        axes.set(xscale="log", yscale="log", title=COLUMNS[told])
        axes.grid(visible=True, which="major", alpha=0.3)
        if axes.has_data():
            axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, which prove that it runs")
    parser.add_argument("--of", nargs="+", choices=[*TOLD], default=[*TOLD], help="what is to grow")
    given, console = parser.parse_args(), Console()
    publish(asyncio.run(measure(QUICK if given.quick else FULL, given.of, console)), console)


if __name__ == "__main__":
    main()
