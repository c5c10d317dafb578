"""The engine's own work between decode steps, with the real engine over the real executor."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import aclosing
from dataclasses import dataclass
from statistics import median

from kvloom.engine.engine import Engine
from kvloom.exec.cpu.executor import TorchExecutor
from kvloom.exec.loader import LoadedModel
from kvloom.kv.arena import Arena
from kvloom.plan.cost.profile import Stepped
from kvloom.transfer.shared_memory import ShmTransport
from kvloom.types.clock import WallClock
from kvloom.types.job import Job, JobResult, Phase
from kvloom.types.request import SamplingParams, StartGenerate
from kvloom.types.spec import EngineSpec


@dataclass(frozen=True, slots=True)
class Seen:
    """A job of `batch` sequences. gap: seconds from the result of the one before to its launch; span: from
    launch to result."""

    phase: Phase
    batch: int
    gap: float
    span: float


class WatchedExecutor(TorchExecutor):
    """Watches jobs that run one after the other."""

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
            self.seen.append(Seen(job.phase, len(job.plan.sequences), gap, self._ended - began))

        future.add_done_callback(end)  # before the engine's own, which are added later
        return future


PROMPT = 8


async def measure_steps(
    executor: WatchedExecutor, spec: EngineSpec, model: str, sequences: int, steps: int
) -> Stepped | None:
    """`steps` steps of that many sequences, whose callers are streamed each token. None if they never ran
    all together, because the pool does not hold them."""
    executor.seen.clear()
    transport = ShmTransport(spec.unit, executor.arena)
    try:
        async with asyncio.TaskGroup() as group:
            engine = Engine(executor, transport, spec, WallClock())
            group.create_task(engine.run())
            await asyncio.gather(*[_call(engine, model, i, steps) for i in range(sequences)])
            await engine.stop()
    finally:
        transport.close_all()
    whole = [one for one in executor.seen if one.phase is Phase.DECODE and one.batch == sequences][1:]
    if not whole:
        return None
    return Stepped(
        model=model,
        sequences=sequences,
        between=median(one.gap for one in whole),
        step=median(one.span for one in whole),
    )


async def _call(engine: Engine, model: str, number: int, steps: int) -> None:
    rng = random.Random(number)
    vocab = next(card.vocab_size for card in await engine.models() if card.name == model)
    body = StartGenerate(
        model=model,
        request=f"profile-{number}",
        prompt=[rng.randrange(vocab) for _ in range(PROMPT)],
        sampling=SamplingParams(max_tokens=steps, seed=number),
    )
    async with aclosing(engine.start_generate(body)) as frames:
        async for _ in frames:
            pass
