"""The real executor, under watch."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from kvloom.exec.cpu.executor import TorchExecutor
from kvloom.exec.loader import LoadedModel
from kvloom.kv.arena import Arena
from kvloom.types.job import Job, JobResult, Phase


@dataclass(frozen=True, slots=True)
class Seen:
    """A job of `batch` sequences. gap: seconds from the result of the one before to its launch; span: from
    launch to result."""

    phase: Phase
    batch: int
    gap: float
    span: float


class WatchedExecutor(TorchExecutor):
    """For jobs one after the other."""

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
