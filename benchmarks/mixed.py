"""Time per token while long prompts come: mixed jobs against prefills and decode steps apart.

python -m benchmarks.mixed [--shape B] [--threads 1 2] [--rounds 3] [--requests 60] [--load 0.5]. The default
policy over the real executor in float32, once as it is and once without mixed jobs, which alternate round by
round with the same requests. Prompts of 1,000 tokens. First the most that each side answers is measured, with
all requests at once; then requests come at random at `load` times what the side without mixed jobs can do.
"Per token" is the mean of one request, "between tokens" each pause by itself. Beside it the simulation of the
same requests, by a profile that is measured first. No gateway and no HTTP: what is asked is the engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import uvloop
import yaml
from tools.make_checkpoint import BYTES, SHAPES

from benchmarks.engines import MODEL, spec_of
from benchmarks.places import BENCH, checkpoint
from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from benchmarks.truth import kvloom
from kvloom.engine.batching import POLICIES
from kvloom.engine.engine import Engine
from kvloom.exec.cpu.executor import TorchExecutor, load_executor
from kvloom.lab.sim.links import ModelledPlane, TimedLink
from kvloom.lab.sim.unit import SimulatedUnit, modelled_executor
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual
from kvloom.plan.cost.measured import ProfiledCostModel
from kvloom.plan.cost.profile import read_profile
from kvloom.serve.engine import open_transport
from kvloom.types.clock import Clock, WallClock
from kvloom.types.request import SamplingParams, StartGenerate, TokenEvent
from kvloom.types.spec import EngineSpec

PROMPT: Final = 1000
OUTPUTS: Final = (16, 96)  # the fewest and the most tokens of an answer
POOL: Final = 1 << 30
SIDES: Final = ("apart", "mixed")
LESS_TIME, NO_LESS_WORK = 1.5, 1.0


@dataclass(frozen=True, slots=True)
class Effort:
    rounds: int = 3
    requests: int = 60
    at_once: int = 24
    load: float = 0.5
    quick: bool = False


QUICK: Final = Effort(rounds=1, requests=4, at_once=2, quick=True)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: when it comes, and how many tokens it wants."""

    at: float
    output: int


@dataclass(slots=True)
class Pace:
    """What requests saw, in seconds. whole: the time until the last of them was over."""

    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    whole: float = 0.0

    @property
    def measures(self) -> tuple[float, ...]:
        """Returns the P99 per token and between tokens, the median between tokens, and the median and the P99
        to the first token, in milliseconds; and tokens a second."""
        return (
            _quantile(self.per_token, 0.99),
            _quantile(self.between, 0.99),
            _quantile(self.between, 0.5),
            _quantile(self.first, 0.5),
            _quantile(self.first, 0.99),
            self.tokens / self.whole,
        )


def _quantile(seconds: Sequence[float], part: float) -> float:
    return 1e3 * float(np.quantile(seconds, part))


@contextmanager
def side(name: str) -> Iterator[None]:
    """Runs the block under the default policy as it is (`mixed`), or without mixed jobs (`apart`)."""
    before = POLICIES["adbs"]
    if name == "apart":
        POLICIES["adbs"] = lambda view: before(dataclasses.replace(view, mixes=False))
    try:
        yield
    finally:
        POLICIES["adbs"] = before


def drawn(count: int, rate: float, seed: int) -> list[Asked]:
    """Returns requests that come at random, `rate` of them a second; all at once if that is 0."""
    draw, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at += draw.expovariate(rate) if rate else 0.0
        found.append(Asked(at, draw.randint(*OUTPUTS)))
    return found


async def play(engine: Engine, clock: Clock, asked: Sequence[Asked], seed: int) -> Pace:
    """Asks the engine, which runs, in real or virtual time. Returns what the requests saw."""
    pace, begin, prompts = Pace(), clock.now(), np.random.default_rng(seed)

    async def one(number: int, ask: Asked, prompt: list[int]) -> None:
        body = StartGenerate(
            model=MODEL,
            request=f"r{number}",
            prompt=prompt,
            sampling=SamplingParams(max_tokens=ask.output, seed=number),
        )
        times: list[float] = []
        async with aclosing(engine.start_generate(body)) as frames:
            async for frame in frames:
                times += [clock.now()] * sum(isinstance(event, TokenEvent) for event in frame)
        pace.first.append(times[0] - begin - ask.at)
        pace.per_token.append((times[-1] - times[0]) / (len(times) - 1))
        pace.between += np.diff(times).tolist()
        pace.tokens += len(times)

    async with asyncio.TaskGroup() as group:
        for number, ask in enumerate(asked):
            prompt: list[int] = prompts.integers(0, BYTES, PROMPT).tolist()
            if begin + ask.at > clock.now():
                await clock.sleep(begin + ask.at - clock.now())
            group.create_task(one(number, ask, prompt))
    pace.whole = clock.now() - begin
    return pace


Player = Callable[[Sequence[Asked], int], Pace]


def real(executor: TorchExecutor, spec: EngineSpec) -> Player:
    """Returns what plays requests to an engine over the executor."""

    async def main(asked: Sequence[Asked], seed: int) -> Pace:
        transport, clock = open_transport(spec, executor.arena), WallClock()
        engine = Engine(executor, transport, spec, clock)
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.run())
            pace = await play(engine, clock, asked, seed)
            engine.stop()
        transport.close_all()
        return pace

    def run(asked: Sequence[Asked], seed: int) -> Pace:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main(asked, seed))

    return run


def modelled(unit: SimulatedUnit) -> Player:
    """Returns what plays requests to an engine over the unit's model."""

    async def main(asked: Sequence[Asked], seed: int) -> Pace:
        clock, executor = LoopClock(asyncio.get_running_loop()), modelled_executor(unit)
        transport = ModelledPlane().join(unit.spec.unit, executor.blocks, TimedLink(1e9, 1e-4))
        engine = Engine(executor, transport, unit.spec, clock)
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.run())
            pace = await play(engine, clock, asked, seed)
            engine.stop()
        return pace

    def run(asked: Sequence[Asked], seed: int) -> Pace:
        coroutine: Coroutine[None, None, Pace] = main(asked, seed)
        return run_virtual(coroutine)

    return run


@dataclass(slots=True)
class Found:
    """The measures of a side's rounds, and the tokens a second of all requests at once."""

    paces: list[tuple[float, ...]] = field(default_factory=list)
    most: list[float] = field(default_factory=list)

    @property
    def medians(self) -> list[float]:
        return [*(median(values) for values in zip(*self.paces, strict=True)), median(self.most)]


def compare(player: Player, effort: Effort, rate: float = 0.0) -> tuple[dict[str, Found], float]:
    """Returns what was found of each side, and the requests a second that came; those of `rate`, or `load`
    times what the side without mixed jobs answers."""
    found = {name: Found() for name in SIDES}
    at_once = drawn(effort.at_once, 0.0, 0)
    answered = []
    for turn in range(effort.rounds + 1):
        for name in SIDES:
            with side(name):
                pace = player(at_once, turn)
            if turn:  # the first warms
                found[name].most.append(pace.tokens / pace.whole)
                answered += [len(at_once) / pace.whole] if name == SIDES[0] else []
    rate = rate or effort.load * median(answered)
    for turn in range(effort.rounds):
        asked = drawn(effort.requests, rate, 1 + turn)
        for name in SIDES:
            with side(name):
                found[name].paces.append(player(asked, 100 + turn).measures)
    return found, rate


def config_of(shape: str, threads: int) -> Path:
    """Returns the file of the config that is profiled, and writes it."""
    file = BENCH / "mixed" / f"{shape}-{threads}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    models = {MODEL: {"path": str(checkpoint(shape)), "dtype": "float32"}}
    file.write_text(yaml.safe_dump({"models": models, "threads": threads, "kv_memory": "1GiB"}))
    return file


async def profile(shape: str, threads: int, *, quick: bool) -> Path:
    """Returns the profile of the shape on so many cores, measured by `kvloom profile`."""
    config = await asyncio.to_thread(config_of, shape, threads)
    output = config.with_suffix(".json")
    await kvloom("profile", config, "-o", output, *(["--quick"] if quick else []))
    return output


COLUMNS: Final = (
    "per token P99",
    "between P99",
    "between P50",
    "first P50",
    "first P99",
    "tok/s",
    "most tok/s",
)


async def measure(shape: str, threads: Sequence[int], effort: Effort) -> Report:
    rows: list[list[Cell]] = []
    findings: list[Finding] = []
    raw: dict[str, object] = {}
    machine = this_machine()
    for count in threads:
        spec = spec_of(shape, f"mixed-{count}", kv_bytes=POOL, threads=count)
        measured = read_profile(await profile(shape, count, quick=effort.quick))
        executor = await asyncio.to_thread(load_executor, spec)
        try:
            real_found, rate = await asyncio.to_thread(compare, real(executor, spec), effort)
        finally:
            executor.close()
        cost = ProfiledCostModel(measured, count)
        unit = SimulatedUnit(spec, measured.shapes, count, cost, engine_gap=cost.engine_gap, max_steps=1)
        told_found, _ = await asyncio.to_thread(
            compare, modelled(unit), dataclasses.replace(effort, rounds=1), rate
        )
        cores = f"{count} core{'s' if count > 1 else ''}"
        for world, found in (("", real_found), (", simulated", told_found)):
            for name in SIDES:
                rows.append([f"{cores}, {name}{world}", *found[name].medians])
                raw[f"{cores}/{name}{world}"] = found[name]
            apart, mixed = (found[name].medians for name in SIDES)
            least = None if world else LESS_TIME
            findings += [
                Finding(
                    what=f"{cores}{world}: {COLUMNS[i]}, apart / mixed",
                    value=apart[i] / mixed[i],
                    unit="×",
                    least=least,
                )
                for i in (0, 1)
            ]
            findings.append(
                Finding(
                    what=f"{cores}{world}: most tokens/s, mixed / apart",
                    value=mixed[-1] / apart[-1],
                    unit="×",
                    least=None if world else NO_LESS_WORK,
                )
            )
    return Report(
        name="mixed",
        title=f"Shape {shape}, prompts of {PROMPT} tokens at {effort.load:g} of the most (ms and tokens/s)",
        columns=["", *COLUMNS],
        rows=rows,
        findings=findings,
        machine=machine,
        raw=raw,
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="B")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    whole = Effort()
    parser.add_argument("--rounds", type=int, default=whole.rounds)
    parser.add_argument("--requests", type=int, default=whole.requests)
    parser.add_argument("--load", type=float, default=whole.load)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    effort = QUICK if options.quick else Effort(options.rounds, options.requests, load=options.load)
    publish(asyncio.run(measure(options.shape, options.threads, effort)))


if __name__ == "__main__":
    main()
