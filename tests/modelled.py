"""A device made of arithmetic: an executor whose next token is a hash of what really lies in the pages.

Nothing here knows the wall clock or a random number that its seed does not give, so every run replays.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

from kvloom.engine.engine import Engine
from kvloom.lab.faults.invariants import InvariantChecker, digest, lone_answer
from kvloom.offload.terms import OffloadBackend
from kvloom.types.clock import Clock
from kvloom.types.geometry import I32, Geometry
from kvloom.types.job import Job, JobResult
from kvloom.types.prefix_store import PrefixStore
from kvloom.types.request import Level, ModelCard, StartGenerate, TokenLogprob
from kvloom.types.spec import EngineSpec, ModelSpec, Policy, Quotas, Slo
from kvloom.types.transfer import Transport
from tests.engines import Answer
from tests.plane import Plane

BLOCK = 256
VOCAB = 1000
CONTEXT = 96
GEOMETRIES = {
    "wide": Geometry(layers=2, kv_heads=2, head_dim=8, itemsize=4, block_bytes=BLOCK),  # 4 tokens, 4 blocks
    "tall": Geometry(layers=5, kv_heads=1, head_dim=12, itemsize=2, block_bytes=BLOCK),  # 5 tokens, 5 blocks
    "thin": Geometry(layers=1, kv_heads=1, head_dim=16, itemsize=4, block_bytes=BLOCK),  # 2 tokens, 1 block
}
_QUIET = 50  # turns of the event loop in which everything that can happen at once has happened


class Broken(RuntimeError):
    """A job that was told to fail."""


def surprise(model: str, tokens: Sequence[int], token: int) -> float:
    """A log-probability for `token` after `tokens`."""
    return -(digest(model, list(tokens), token) % 4096) / 64


def card(model: str, context: int = CONTEXT) -> ModelCard:
    return ModelCard(
        name=model,
        path="/nowhere",
        context_length=context,
        vocab_size=VOCAB,
        tokenizer="{}",
        chat_template=None,
        special_tokens={},
        eos_token_ids=(),
        bos_token_id=None,
        add_bos=False,
        architecture="Modelled",
        parameters=0,
        dtype="float32",
    )


class ModelledWeights:
    """Satisfies `WeightMemory`. A model's weights come in parts, each after a few turns of the event loop.
    Blocks whose memory weights take lose what they hold."""

    def __init__(self, executor: ModelledExecutor, blocks: Mapping[str, int], parts: int = 3) -> None:
        self.blocks = dict(blocks)
        self.awake: set[str] = set()
        self.wakes: list[str] = []
        self.unreadable: set[str] = set()
        self._executor = executor
        self._parts = parts
        self._read = dict.fromkeys(blocks, 0)
        self._away: set[int] = set()

    def make_room(self, blocks: I32) -> None:
        self._executor.arena[blocks] = -1
        if twice := self._away & set(blocks.tolist()):
            self._executor.wrong.append(f"blocks {twice} are given up, and never came back before")
        self._away |= set(blocks.tolist())

    def take_back(self, blocks: I32) -> None:
        if not self._away >= (back := set(blocks.tolist())):
            self._executor.wrong.append(f"blocks {back - self._away} come back that were never given up")
        self._away -= back

    def wake(self, model: str) -> asyncio.Future[bool]:
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._after(2, model, future)
        return future

    def _after(self, turns: int, model: str, future: asyncio.Future[bool]) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._after, turns - 1, model, future)
        elif model in self.unreadable:
            future.set_exception(OSError(5, "Input/output error"))
        else:
            self.wakes += [model] if model not in self.awake else []
            self.awake.add(model)
            self._read[model] += 1
            future.set_result(self._read[model] == self._parts)

    def sleep(self, model: str) -> None:
        if any(job.model == model for job in self._executor.running):
            self._executor.wrong.append(f"{model} falls asleep in a job")
        self.awake.discard(model)
        self._read[model] = 0


class ModelledExecutor:
    """An arena of numbers, each of which says whose layer, head, position and token it is.

    Jobs last a few turns of the event loop. Some write at their start and read at their end, the others do
    all at their end, so that pages given away too early, or copied from too late, are seen. `wrong` gathers
    what was not where it should be; `failing` are the jobs, counted from 0, that raise halfway.
    """

    def __init__(
        self,
        blocks: int,
        *,
        compute: int = 2,
        seed: int = 0,
        models: Collection[str] = tuple(GEOMETRIES),
        failing: Collection[int] = (),
        context: int = CONTEXT,
        seconds: float = 0.0,
    ) -> None:
        """seconds: what each job says that it took."""
        self.blocks = blocks
        self._seconds = seconds
        self.compute = compute
        self.max_steps, self.lookahead = 1, 0
        self.geometries = {model: GEOMETRIES[model] for model in models}
        self.cards = {model: card(model, context) for model in models}
        self.failing = failing
        self.idle = compute
        self.jobs: list[Job] = []
        self._random = random.Random(seed)
        self.witness = InvariantChecker(self.geometries, blocks, VOCAB)
        self.arena = self.witness.arena
        self.wrong = self.witness.wrong
        self.running: list[Job] = []
        self.weights: ModelledWeights | None = None
        self.adapters = None

    def steps_begun(self, job: Job) -> int:
        return job.steps

    def cut(self, job: Job) -> None:
        """Each has one step."""

    def launch(self, job: Job) -> asyncio.Future[JobResult]:
        future: asyncio.Future[JobResult] = asyncio.get_running_loop().create_future()
        number = len(self.jobs)
        self.jobs.append(job)
        if not 1 <= job.share <= self.idle:
            self.wrong.append(f"job {number} on {job.share} of {self.idle} idle units")
        if self.weights is not None and job.model not in self.weights.awake:
            self.wrong.append(f"job {number} of {job.model}, which is asleep")
        self.idle -= job.share
        self.running.append(job)
        early = self._random.random() < 0.5
        if early:
            self._write(job)
        self._after(self._random.randint(1, 6), number, job, early, future)
        return future

    def _after(
        self, turns: int, number: int, job: Job, early: bool, future: asyncio.Future[JobResult]
    ) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._after, turns - 1, number, job, early, future)
            return
        self.idle += job.share
        self.running.remove(self.jobs[number])
        if number in self.failing:
            future.set_exception(Broken(f"job {number}"))
            return
        if not early:
            self._write(job)
        future.set_result(self._read(job))

    def _write(self, job: Job) -> None:
        layers = job.plan.page_map.shape[1]
        self.witness.begin(job)
        self.witness.write(job, range(layers))
        for layer in range(layers):
            for send in job.plan.sends:
                send.put(job.plan.page_map, layer)

    def _read(self, job: Job) -> JobResult:
        tokens, read = self.witness.draw(job, 0), self.witness.read(job) if job.prompts else []
        prompts = [TokenLogprob(surprise(job.model, read[p.row], p.token)) for p in job.prompts]
        return JobResult(tokens, [None] * len(tokens), prompts, self._seconds)


class JobClock:
    """Half a second a job, so that quotas adapt every sixteen."""

    def __init__(self, executor: ModelledExecutor) -> None:
        self._executor = executor

    def now(self) -> float:
        return len(self._executor.jobs) / 2

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


def engine_over(
    executor: ModelledExecutor,
    transport: Transport | None = None,
    *,
    clock: Clock | None = None,
    policy: Policy = "adbs",
    rates: Mapping[str, float] | None = None,
    max_running: int = 16,
    chunk_tokens: int = 16,
    priorities: tuple[Level, ...] = (),
    offload: OffloadBackend | None = None,
    quotas: Quotas = "adaptive",
    store: PrefixStore | None = None,
    slos: Mapping[str, Slo] | None = None,
    share: float | None = None,
) -> Engine:
    """share: the planned one of each model's prefills, and of its decodes."""
    models = tuple(
        ModelSpec(
            name=model,
            path="/nowhere",
            rate=(rates or {}).get(model, 1.0),
            slo=(slos or {}).get(model, Slo()),
            prefill_share=share,
            decode_share=share,
        )
        for model in executor.cards
    )
    spec = EngineSpec(
        models=models,
        kv_bytes=executor.blocks * BLOCK,
        block_bytes=BLOCK,
        policy=policy,
        max_running=max_running,
        max_waiting=64,
        chunk_tokens=chunk_tokens,
        threads=executor.compute,
        priorities=priorities,
        quotas=quotas,
    )
    transport = transport or Plane().join("alone", executor)
    return Engine(executor, transport, spec, clock or JobClock(executor), offload, store=store)


@asynccontextmanager
async def modelled(engine: Engine, executor: ModelledExecutor) -> AsyncIterator[None]:
    """The engine while it runs; afterwards every page held what it should, and laws 1 and 4 hold."""
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:  # a hang is a failure, not a wait
        group.create_task(engine.run())
        try:
            yield
        finally:
            engine.stop()
    assert not executor.wrong, executor.wrong[:5]
    assert executor.idle == executor.compute
    engine.pool.check()
    assert engine.pool.available == engine.pool.total


async def turns(count: int = _QUIET) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def finish(
    executor: ModelledExecutor, tasks: Iterable[asyncio.Task[object]], *, most_jobs: int
) -> None:
    """Wait for `tasks` while jobs run. Fails as they do, and where no job starts or jobs run for ever."""
    tasks = list(tasks)
    waiting, quiet = tasks, 0
    while waiting := [task for task in waiting if not task.done()]:
        await asyncio.sleep(
            0 if quiet < _QUIET // 2 else 0.02
        )  # a thread may be at work, such as a compiler's
        quiet = quiet + 1 if executor.idle == executor.compute else 0
        stuck = quiet > _QUIET or len(executor.jobs) > most_jobs
        if stuck:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        assert quiet <= _QUIET, f"deadlock: {len(waiting)} requests wait, and no job runs"
        assert len(executor.jobs) <= most_jobs, f"livelock: {len(waiting)} requests after {most_jobs} jobs"
    for task in tasks:
        task.result()


def expected(executor: ModelledExecutor, body: StartGenerate) -> dict[int, list[int]]:
    """Every choice's tokens, worked out without an engine."""
    context = executor.cards[body.model].context_length
    return {choice: lone_answer(body, choice, context=context, vocab=VOCAB) for choice in range(body.n)}


async def ask(engine: Engine, body: StartGenerate) -> Answer:
    answer = Answer()
    async for frame in engine.start_generate(body):
        answer.take(frame)
    assert len(answer.ends) == body.n
    return answer
