"""The jobs that are measured, the real executor that runs them, and the engine's own work between steps."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np
from msgspec.structs import replace

from kvloom.engine.engine import Engine
from kvloom.engine.queues import limit_context
from kvloom.exec.cpu.executor import TorchExecutor
from kvloom.exec.loader import LoadedModel
from kvloom.kv.arena import Arena
from kvloom.kv.pool import Pool
from kvloom.plan.cost.profile import EngineStep, PrefillGap
from kvloom.plan.cost.work import Work
from kvloom.transfer.shared_memory import ShmTransport
from kvloom.types.clock import WallClock
from kvloom.types.job import Job, JobResult, Phase, SampleRow
from kvloom.types.request import Event, SamplingParams, StartGenerate
from kvloom.types.spec import EngineSpec, Slo

BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
CONTEXTS: Final = (16, 128, 512, 2048)
SPLITS: Final = (4, 16)  # prompts of a prefill job
MIXED_PROMPTS, MIXED_ROWS, MIXED_CONTEXT = (48, 128, 288), (2, 10, 32), 128  # tokens, sequences, tokens
SEED: Final = 1
MOST_SEQUENCES: Final = 1024
PROMPT: Final = 8  # tokens of a sequence under the engine
AT_LEISURE: Final = Slo(ttft=3600.0, tpot=3600.0)
PROMPT_EVERY: Final = 3  # steps there from one request to the next that has an answer of one token


@dataclass(frozen=True, slots=True)
class Setting:
    """A job to measure. `starts` are the tokens that each sequence has already, and `appends` those that the
    job computes."""

    model: str
    phase: Phase
    cores: int
    starts: tuple[int, ...]
    appends: tuple[int, ...]
    rows: int = 0
    """The sequences of a mixed job that decode, which are its first ones."""

    def work(self, cores: int) -> Work:
        """Returns the job as a cost model sees it, on a machine of so many cores."""
        appends, starts = np.asarray(self.appends), np.asarray(self.starts)
        return Work.of(
            self.model, self.phase, self.cores / cores, appends, starts, len(self.starts), self.rows
        )

    def fits(self, limits: Limits) -> bool:
        lengths = [start + append for start, append in zip(self.starts, self.appends, strict=True)]
        pages = sum(-(-length // limits.page) for length in lengths)
        return (
            len(lengths) <= limits.batch
            and max(lengths) <= limits.context
            and pages * limits.page <= limits.tokens
            and (self.phase is Phase.DECODE or sum(self.appends) <= limits.chunk)
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one model in its pool: tokens of the longest sequence, of a page and of the whole pool,
    tokens that a prefill job takes, sequences that run together."""

    context: int
    page: int
    tokens: int
    chunk: int
    batch: int


def prefill(model: str, cores: int, prompts: int, tokens: int, context: int = 0) -> Setting:
    """Returns a prefill of `tokens` new tokens in all, shared evenly among prompts that have `context` tokens
    each."""
    appends = tuple(tokens // prompts + (i < tokens % prompts) for i in range(prompts))
    return Setting(model, Phase.PREFILL, cores, (context,) * prompts, appends)


def decode(model: str, cores: int, batch: int, context: int) -> Setting:
    """Returns a decode step of sequences that have `context` tokens on average, the longest three times as
    many as the shortest."""
    spread = np.linspace(0.5, 1.5, batch) if batch > 1 else np.ones(1)
    starts = tuple(max(1, round(context * float(part))) for part in spread)
    return Setting(model, Phase.DECODE, cores, starts, (1,) * batch)


def mixed(model: str, cores: int, rows: int, context: int, tokens: int) -> Setting:
    """Returns a mixed job: the decode step of `rows` sequences, and a prompt of so many tokens."""
    step = decode(model, cores, rows, context)
    return Setting(model, Phase.MIXED, cores, (*step.starts, 0), (*step.appends, tokens), rows)


def core_counts(cores: int) -> list[int]:
    """Returns the numbers of cores that jobs are measured on: each up to 4, then powers of two, half of all,
    and all."""
    return sorted({*range(1, min(cores, 4) + 1), *_doubling(4, cores), (cores + 1) // 2, cores})


def grid(model: str, cores: int, limits: Limits, *, quick: bool = False) -> list[Setting]:
    """Returns the settings of a grid, and some between its lines, that fit; if `quick`, a quarter of them."""
    rng = random.Random(SEED)
    found = [*_prefills(model, cores, limits), *_decodes(model, cores, limits)]
    for rows, tokens in itertools.product(MIXED_ROWS, MIXED_PROMPTS):
        found.append(mixed(model, cores, rows, min(MIXED_CONTEXT, limits.context // 2), tokens))
    found += [_off_grid(rng, model, cores, limits) for _ in range(24)]
    fitting = [setting for setting in dict.fromkeys(found) if setting.fits(limits)]
    every = 4 if quick else 1
    phases = [[setting for setting in fitting if setting.phase is phase] for phase in Phase]
    return [setting for found in phases for setting in found[::every]]


def _prefills(model: str, cores: int, limits: Limits) -> Iterator[Setting]:
    sizes = [*_doubling(4, limits.chunk), limits.chunk]
    between = [size + size // 2 + 1 for size in sizes[1:-2]]  # of which rows are filled up
    for tokens in (*sizes, *between):
        yield prefill(model, cores, 1, tokens)
    for tokens in sizes:
        for prompts in SPLITS:
            if tokens >= 8 * prompts:
                yield prefill(model, cores, prompts, tokens)
    for tokens in sizes[2::2]:
        for context in CONTEXTS[1:]:
            yield prefill(model, cores, 1, tokens, context)


def _decodes(model: str, cores: int, limits: Limits) -> Iterator[Setting]:
    for batch in BATCHES:
        for context in (*CONTEXTS, 2 * limits.context // 3 - 1):
            yield decode(model, cores, batch, context)


def _off_grid(rng: random.Random, model: str, cores: int, limits: Limits) -> Setting:
    """Returns a random job, mostly between the grid's lines, such as the engine makes."""
    if rng.random() < 0.5:
        batch = round(limits.batch ** rng.random())
        return decode(model, cores, batch, round(limits.context ** rng.uniform(0.4, 0.9)))
    tokens = max(2, round(limits.chunk ** rng.uniform(0.3, 1.0)))
    context = round(limits.context ** rng.uniform(0.4, 0.8)) if rng.random() < 0.4 else 0
    return prefill(model, cores, min(tokens // 2, rng.choice((1, 1, 2, 3, 5, 8))), tokens, context)


def _doubling(begin: int, end: int) -> list[int]:
    """Returns begin, 2·begin, … as far as they are less than end."""
    return [begin << i for i in range(32) if begin << i < end]


class JobRunner:
    """Runs the job of a setting again and again over the same sequences. None of them grows, and what they
    have is taken as computed, because time does not depend on what K and V are."""

    def __init__(self, executor: TorchExecutor, *, temperature: float) -> None:
        self._executor = executor
        self._cards = {
            name: limit_context(card, executor.geometries[name], executor.blocks)
            for name, card in executor.cards.items()
        }
        self.pool = Pool(
            executor.blocks,
            executor.geometries,
            max_sequences=MOST_SEQUENCES,
            max_tokens={name: card.context_length for name, card in self._cards.items()},
        )
        self._params = SamplingParams(max_tokens=1, seed=0, temperature=temperature)
        self._ids = itertools.count()
        self._tokens = np.random.default_rng(0)
        executor.arena.bytes.zero_()  # so that no page of it is touched for the first time while time runs

    def limits(self, model: str, chunk: int, batch: int) -> Limits:
        """Returns the limits of a model's jobs. `chunk` and `batch` are the engine's limits."""
        geometry = self._executor.geometries[model]
        width = geometry.tokens_per_block
        tokens = self._executor.blocks // geometry.blocks_per_page * width
        context = self._cards[model].context_length
        return Limits(context, width, tokens, min(chunk, context), min(batch, MOST_SEQUENCES))

    @contextmanager
    def placed(self, setting: Setting) -> Iterator[list[int]]:
        """Yields sequences that have the setting's tokens, and removes them afterwards."""
        cache = self.pool.caches[setting.model]
        ids = [next(self._ids) for _ in setting.starts]
        for number in ids:
            cache.add_sequence(number)
        try:
            held = [(one, start) for one, start in zip(ids, setting.starts, strict=True) if start]
            if held:
                cache.end_forward(cache.begin_forward([one for one, _ in held], [n for _, n in held]))
            yield ids
        finally:
            for number in ids:
                cache.remove_sequence(number)

    async def run(self, setting: Setting, ids: list[int]) -> float:
        """Returns the seconds of one job, from launch to result."""
        cache = self.pool.caches[setting.model]
        plan = cache.begin_forward(ids, setting.appends)
        tokens = self._tokens.integers(self._cards[setting.model].vocab_size, size=int(plan.appends.sum()))
        last = np.cumsum(plan.appends) - 1
        samples = tuple(
            SampleRow(row=int(row), key=number, index=0, params=self._params)
            for number, row in zip(ids, last, strict=True)
        )
        job = Job(setting.model, setting.phase, setting.cores, plan, tokens, samples, rows=setting.rows)
        began = time.perf_counter()
        try:
            await self._executor.launch(job)
            return time.perf_counter() - began
        finally:
            cache.abort_forward(plan)  # the sequences are as before

    @staticmethod
    def told(setting: Setting) -> str:
        """Returns the setting in words, for a progress bar."""
        context = sum(setting.starts) // len(setting.starts)
        what = f"{len(setting.starts)} sequences of {context}"
        if setting.phase is not Phase.DECODE:
            what = f"{sum(setting.appends)} tokens after {context}"
        return f"{setting.model} {setting.phase.value} {what}, {setting.cores} cores"


@dataclass(frozen=True, slots=True)
class Seen:
    """A job that the executor has run."""

    phase: Phase
    batch: int
    """The number of its sequences."""
    context: int
    """The tokens that these had before."""
    gap: float
    """Seconds from the result of the job before to its launch."""
    span: float
    """Seconds from its launch to its result."""


class WatchedExecutor(TorchExecutor):
    """An executor that records the times of its jobs, which must run one after the other."""

    def __init__(self, models: dict[str, LoadedModel], arena: Arena, threads: int) -> None:
        super().__init__(models, arena, threads)
        self.seen: list[Seen] = []
        self._ended = time.perf_counter()

    def launch(self, job: Job) -> asyncio.Future[JobResult]:
        began = time.perf_counter()
        gap = began - self._ended
        future = super().launch(job)

        def end(_: object) -> None:
            self._ended = time.perf_counter()
            plan, span = job.plan, self._ended - began
            self.seen.append(Seen(job.phase, len(plan.sequences), int(plan.starts.sum()), gap, span))

        future.add_done_callback(end)  # before the engine's own, which are added later
        return future


async def measure_step(
    executor: WatchedExecutor, spec: EngineSpec, model: str, sequences: int, steps: int, temperature: float
) -> EngineStep | None:
    """Measures `steps` steps of that many sequences, whose callers are told of all tokens at the end: what
    sending them costs is measured under the server. Returns None if the sequences never ran all together,
    because the pool does not hold them."""
    requests = [_Request(model, i, PROMPT, steps, temperature, interval=steps) for i in range(sequences)]
    async with _engine(executor, spec) as engine:
        await asyncio.gather(*[_answered(engine, one) for one in requests])
    whole = [one for one in executor.seen if one.phase is Phase.DECODE and one.batch == sequences][1:]
    if not whole:
        return None
    return EngineStep(
        model=model,
        sequences=sequences,
        gap=median(one.gap for one in whole),
        step=median(one.span for one in whole),
        context=round(median(one.context for one in whole)),
    )


async def measure_prefill_gap(
    executor: WatchedExecutor, spec: EngineSpec, model: str, prompts: int, tokens: int, temperature: float
) -> PrefillGap | None:
    """Measures what requests cost an engine besides their jobs. While one sequence decodes, so many come, one
    after every `PROMPT_EVERY` of its steps, each with `tokens` of a prompt and an answer of one. Returns None
    if no job between two steps had prompts."""
    request = _Request(model, 0, PROMPT, PROMPT_EVERY * (prompts + 1), temperature)
    async with _engine(executor, spec) as engine, asyncio.TaskGroup() as group:
        at = 0
        async with aclosing(_frames(engine, request)) as frames:
            async for frame in frames:
                at += bool(frame)
                if frame and at % PROMPT_EVERY == 0 and at <= PROMPT_EVERY * prompts:
                    group.create_task(_answered(engine, _Request(model, at, tokens, 1, temperature)))
    seen, plain, prompted = executor.seen, list[float](), list[float]()
    for before, one, after in zip(seen, seen[1:], seen[2:], strict=False):
        if before.phase is one.phase is Phase.DECODE:
            plain.append(one.gap)
        elif before.phase is after.phase is Phase.DECODE:
            prompted.append(one.gap + after.gap)
    if not plain or not prompted:
        return None
    return PrefillGap(model=model, gap=max(0.0, median(prompted) - 2 * median(plain)))


@asynccontextmanager
async def _engine(executor: WatchedExecutor, spec: EngineSpec) -> AsyncIterator[Engine]:
    """Yields an engine on the executor, which has seen no job yet. Its jobs run one after the other, each on
    all cores: the policy is `slack`, no model has a planned share or drafts, everything is in time, and all
    requests may wait."""
    executor.seen.clear()
    models = tuple(
        replace(model, prefill_share=None, decode_share=None, speculation="none", slo=AT_LEISURE)
        for model in spec.models
    )
    spec = replace(spec, policy="slack", models=models, max_waiting=MOST_SEQUENCES)
    transport = ShmTransport(spec.unit, executor.arena)
    try:
        async with asyncio.TaskGroup() as group:
            engine = Engine(executor, transport, spec, WallClock())
            group.create_task(engine.run())
            yield engine
            engine.stop()
    finally:
        transport.close_all()


@dataclass(frozen=True, slots=True)
class _Request:
    """A request for a model, with a prompt and an answer of so many tokens. `interval` is that of frames."""

    model: str
    number: int
    prompt: int
    output: int
    temperature: float
    interval: int = 1


async def _answered(engine: Engine, request: _Request) -> None:
    async for _ in _frames(engine, request):
        pass


async def _frames(engine: Engine, request: _Request) -> AsyncGenerator[list[Event], None]:
    """Yields the frames of the answer."""
    rng = random.Random(request.number)
    vocab = next(card.vocab_size for card in await engine.models() if card.name == request.model)
    body = StartGenerate(
        model=request.model,
        request=f"profile-{request.number}",
        prompt=[rng.randrange(vocab) for _ in range(request.prompt)],
        sampling=SamplingParams(
            max_tokens=request.output, seed=request.number, temperature=request.temperature
        ),
        interval=request.interval,
    )
    async with aclosing(engine.start_generate(body)) as frames:
        async for frame in frames:
            yield frame
