"""What weaving costs and brings, on two engine processes with a core each.

python -m benchmarks.weaving [--quick]. Both serve shape A and decode; the hot one has part of its attention
done by the cold one. Weaver's figure 7a: its time a token where the cold one looks for tasks between
iterations, between operators, and with operators split, and the cold one's beside each; and the same where
the cold one has fresh prompts, too. Then what tasks wait by the queueing model and as measured, for several
plans; and what the hot one makes with a quarter of the pool that its load needs, alone and with a loan. All
in turn, round by round, in one run.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from itertools import count
from pathlib import Path
from statistics import median

from msgspec.structs import replace
from rich.console import Console

from benchmarks.engines import MODEL, ending, ready, spec_of
from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from kvloom.router.client import HttpEngineClient
from kvloom.serve.local import ENGINE_MODULE
from kvloom.serve.processes.child import ChildProcess
from kvloom.serve.processes.messages import EngineOrder
from kvloom.types.load import ModelLoad, UnitLoad, Waits
from kvloom.types.request import SamplingParams, StartGenerate
from kvloom.types.spec import EngineSpec, WeaveSpec

HOT, COLD = "hot", "cold"
SHARE = 0.45  # the paper's best
QUARTER = 0.75  # away, where home holds a quarter
LENT = 0.3


@dataclass(frozen=True, slots=True)
class Variant:
    """prompts: fresh ones come to the cold unit beside what it decodes. pool: the hot unit's part of the
    blocks that its sequences, which come and go, need; 0 where all are of one age and there is room. rounds:
    so many of the first that it is in; None for all."""

    weave: WeaveSpec | None
    prompts: bool = False
    pool: float = 0.0
    rounds: int | None = None


VARIANTS = {
    "dedicated": Variant(None),
    "control between iterations": Variant(
        WeaveSpec(COLD, SHARE, LENT, control="iterations", split="none"), rounds=1
    ),
    "between operators": Variant(WeaveSpec(COLD, SHARE, LENT, split="none")),
    "operators split": Variant(WeaveSpec(COLD, SHARE, LENT)),
    "split for 2 %": Variant(WeaveSpec(COLD, SHARE, LENT, waits=0.02)),
    "split for 1 %": Variant(WeaveSpec(COLD, SHARE, LENT, waits=0.01)),
    "prompts at the cold one, dedicated": Variant(None, prompts=True, rounds=2),
    "prompts at the cold one, woven": Variant(WeaveSpec(COLD, SHARE, LENT), prompts=True, rounds=2),
    "the whole pool, dedicated": Variant(None, pool=1.0, rounds=2),
    "a quarter of the pool, dedicated": Variant(None, pool=0.25),
    "a quarter of the pool, woven": Variant(WeaveSpec(COLD, QUARTER, LENT), pool=0.25),
}
ALONE, HOST, OPERATORS, SPLIT, _, FINEST, PROMPTS, FED, WHOLE_POOL, FEW, WOVEN = VARIANTS


@dataclass(slots=True)
class Found:
    """Of one variant, a number a round: milliseconds a token, tokens/s; waits of the last task or so."""

    hot: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    waits: list[Waits] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)  # part of the cold unit's time that tasks take


def told(found: dict[str, Found], title: str) -> Report:
    columns = ["", "hot, ms a token", "cold, ms a token", "hot tokens/s", "wait, µs", "by the model"]
    return Report(
        name="weaving",
        title=title,
        columns=[*columns, "stall, µs", "by the model", "task, µs", "parts", "tasks, % of the cold core"],
        rows=[_row(name, one) for name, one in found.items()],
        findings=_findings(found),
        machine=this_machine(),
        raw={name: {"hot": one.hot, "cold": one.cold, "rate": one.rate} for name, one in found.items()},
    )


def _of(waits: list[Waits], name: str) -> float:
    """Microseconds."""
    return 1e6 * median(float(getattr(one, name)) for one in waits)


def _row(name: str, found: Found) -> list[Cell]:
    row: list[Cell] = [name, median(found.hot), median(found.cold), median(found.rate)]
    if not found.waits:
        return [*row, *[None] * 7]
    names = ("wait", "expected_wait", "stall", "expected_stall", "service")
    parts = max(one.parts for one in found.waits)
    return [*row, *(_of(found.waits, name) for name in names), parts, 100 * median(found.busy)]


def _findings(found: dict[str, Found]) -> list[Finding]:
    hot = {name: median(one.hot) for name, one in found.items()}
    cold = {name: median(one.cold) for name, one in found.items()}
    rate = {name: median(one.rate) for name, one in found.items()}
    return [
        Finding(what="hot, operators against iterations", value=hot[HOST] / hot[OPERATORS], least=3),
        Finding(what="hot, split against operators", value=hot[OPERATORS] / hot[SPLIT], least=1.05),
        Finding(what="hot, split for 1 % against operators", value=hot[OPERATORS] / hot[FINEST]),
        Finding(what="cold, split against dedicated", value=cold[SPLIT] / cold[ALONE], most=1.1),
        Finding(what="hot, split against dedicated", value=hot[SPLIT] / hot[ALONE]),
        Finding(what="prompts at the cold one, hot, woven against dedicated", value=hot[FED] / hot[PROMPTS]),
        Finding(what="prompts at the cold one, cold, the same", value=cold[FED] / cold[PROMPTS]),
        Finding(what="quarter of the pool, hot tokens/s", value=rate[WOVEN] / rate[FEW], least=1.4),
        Finding(what="quarter of the pool, cold", value=cold[WOVEN] / cold[FEW], most=1.15),
        Finding(what="the same, against the whole pool, dedicated", value=cold[WOVEN] / cold[WHOLE_POOL]),
        *(
            Finding(
                what=f"wait by the model against measured, {name}",
                value=_of(one.waits, "expected_wait") / _of(one.waits, "wait"),
                least=0.8,
                most=1.2,
            )
            for name, one in found.items()
            if one.waits
        ),
    ]


CORES = {HOT: 0, COLD: 1}
WHOLE, BLOCK = 1 << 30, 16 << 10  # bytes
PAGE, PAGE_BLOCKS = 32, 144  # tokens; of shape A
PROMPT, OUTPUT, WARM = 32, 96, 12  # tokens; OUTPUT: of those that come and go
PATIENCE = 120.0

FRESH, PAUSE = 128, 0.5  # tokens of a fresh prompt, and seconds until the next


@dataclass(frozen=True, slots=True)
class Effort:
    """hot, cold: sequences at a time; many: hot ones, of whom home holds a quarter. tokens: of each hot one,
    in a measurement; seconds: of one with a quarter of the pool."""

    rounds: int = 3
    hot: int = 12  # a step takes about 1.4 of the cold unit's, as in the paper
    cold: int = 8
    many: int = 16
    tokens: int = 40
    seconds: float = 8.0


QUICK = Effort(rounds=1, tokens=12, seconds=3.0)


@asynccontextmanager
async def engine(spec: EngineSpec, folder: Path, secret: str) -> AsyncIterator[HttpEngineClient]:
    """On a core of its own."""
    path = folder / f"{spec.unit}.sock"
    cores = os.sched_getaffinity(0)
    async with AsyncExitStack() as stack:
        os.sched_setaffinity(0, {sorted(cores)[CORES[spec.unit] % len(cores)]})  # the child inherits it
        try:
            component = await ChildProcess.start(spec.unit, ENGINE_MODULE)
        finally:
            os.sched_setaffinity(0, cores)
        stack.push_async_callback(ending, component)
        await component.order(EngineOrder(spec=spec, socket=str(path), secret=secret))
        await ready(component)
        yield await stack.enter_async_context(HttpEngineClient(f"unix://{path}", secret=secret))


async def one(client: HttpEngineClient, name: str, number: int, tokens: int, length: int = PROMPT) -> None:
    """A request, told of at its end. Requests of one number have one prompt, which is cached soon."""
    body = StartGenerate(
        model=MODEL,
        request=name,
        prompt=[300 + (number * 7919 + i * 104729) % 7800 for i in range(length)],
        sampling=SamplingParams(max_tokens=tokens, seed=number),
        interval=1024,
    )
    async with aclosing(client.start_generate(body)) as frames:
        async for _ in frames:
            pass


@asynccontextmanager
async def busy(client: HttpEngineClient, sequences: int) -> AsyncIterator[None]:
    """So many sequences at any time: who ends is followed by another, of another age."""

    async def again(number: int) -> None:
        turn, tokens = 0, 8 + number * OUTPUT // sequences
        while True:
            await one(client, f"b{number}-{turn}", number, tokens)
            turn, tokens = turn + 1, OUTPUT

    tasks = [asyncio.create_task(again(number)) for number in range(sequences)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def fed(client: HttpEngineClient, numbers: Iterator[int]) -> AsyncIterator[None]:
    """A prompt that nobody has seen, again and again, for one token each."""

    async def again() -> None:
        for number in numbers:
            await one(client, f"p{number}", number, 1, FRESH)
            await asyncio.sleep(PAUSE)

    task = asyncio.create_task(again())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(client: HttpEngineClient, holds: Callable[[UnitLoad], bool]) -> UnitLoad:
    async with asyncio.timeout(PATIENCE):
        while True:
            load = await client.load()
            if holds(load):
                return load
            await asyncio.sleep(0.02)


def steps(load: UnitLoad) -> ModelLoad:
    return load.models[MODEL]


@dataclass(frozen=True, slots=True)
class Units:
    """The cold one, which goes on, and how to start a hot one. fresh: numbers of prompts that it has not
    seen."""

    cold: HttpEngineClient
    folder: Path
    secret: str
    fresh: Iterator[int] = field(default_factory=lambda: count(1000))

    @asynccontextmanager
    async def hot(self, weave: WeaveSpec | None, kv_bytes: int) -> AsyncIterator[HttpEngineClient]:
        spec = replace(spec_of("A", HOT, kv_bytes=kv_bytes, threads=1), weave=weave)
        model = replace(spec.models[0], max_context=PROMPT + 2 * OUTPUT)
        await until(self.cold, lambda load: not load.lent_blocks)
        async with engine(replace(spec, models=(model,)), self.folder, self.secret) as client:
            if weave is not None:
                await until(self.cold, lambda load: load.lent_blocks > 0)
            yield client


async def span(units: Units, hot: HttpEngineClient, found: Found, over: Awaitable[object]) -> None:
    """What both do while `over` lasts."""
    began, first, cold = time.perf_counter(), steps(await hot.load()), await units.cold.load()
    before = steps(cold)
    await over
    load, last = await units.cold.load(), steps(await hot.load())
    took = time.perf_counter() - began
    found.hot.append(1e3 * took / (last.decode_jobs_total - first.decode_jobs_total))
    found.cold.append(1e3 * took / (steps(load).decode_jobs_total - before.decode_jobs_total))
    found.rate.append((last.output_tokens_total - first.output_tokens_total) / took)
    if load.waits is not None and cold.waits is not None:
        found.waits.append(load.waits)
        tasks = load.waits.tasks_total - cold.waits.tasks_total
        found.busy.append(tasks * load.waits.service / took)


async def paced(units: Units, variant: Variant, effort: Effort, found: Found) -> None:
    """All hot sequences of one age, from their WARM-th token on."""
    weave = variant.weave
    async with AsyncExitStack() as stack:
        hot = await stack.enter_async_context(units.hot(weave, WHOLE))
        if variant.prompts:
            await stack.enter_async_context(fed(units.cold, units.fresh))
        many = effort.hot
        tasks = [asyncio.create_task(one(hot, f"h{i}", i, 2 * OUTPUT)) for i in range(many)]
        load = await until(hot, lambda load: steps(load).output_tokens_total >= many * WARM)
        end = steps(load).decode_jobs_total + effort.tokens
        away = steps(load).away
        if weave is not None and not 0.6 * SHARE < away / many < 1.4 * SHARE:
            raise RuntimeError(f"{away} of {many} are away; want a part of about {SHARE}")
        await span(units, hot, found, until(hot, lambda load: steps(load).decode_jobs_total >= end))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def scarce(units: Units, variant: Variant, effort: Effort, found: Found) -> None:
    """Hot sequences that come and go, over a part of the blocks that they need."""
    pages = int(effort.many * -(-(PROMPT + OUTPUT) // PAGE) * variant.pool)
    async with units.hot(variant.weave, pages * PAGE_BLOCKS * BLOCK) as hot, busy(hot, effort.many):
        await until(hot, lambda load: steps(load).output_tokens_total >= effort.many * OUTPUT // 2)
        await span(units, hot, found, asyncio.sleep(effort.seconds))


async def measure(effort: Effort, console: Console) -> Report:
    found = {name: Found() for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        secret = secrets.token_urlsafe(16)
        spec = spec_of("A", COLD, kv_bytes=WHOLE, threads=1)
        async with engine(spec, Path(folder), secret) as cold, busy(cold, effort.cold):
            units = Units(cold, Path(folder), secret)
            for turn in range(effort.rounds):
                for name, variant in VARIANTS.items():
                    if variant.rounds is None or turn < variant.rounds:
                        console.print(f"round {turn + 1}: {name}")
                        measured = scarce if variant.pool else paced
                        await measured(units, variant, effort, found[name])
    title = f"Weaving: {effort.hot} hot sequences, {effort.cold} cold ones, medians of {effort.rounds}"
    return told(found, title)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round: its numbers mean little")
    parser.add_argument("--hot", type=int, help="hot sequences at a time")
    parser.add_argument("--cold", type=int, help="cold ones")
    options = parser.parse_args()
    console = Console()
    effort = QUICK if options.quick else Effort()
    hot, cold = options.hot or effort.hot, options.cold or effort.cold
    publish(asyncio.run(measure(replace_fields(effort, hot=hot, cold=cold), console)), console)


if __name__ == "__main__":
    main()
