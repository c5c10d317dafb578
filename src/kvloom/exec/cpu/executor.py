"""The executor that runs jobs with torch on this machine's cores."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import torch
from torch import Tensor

from kvloom.exec.attention import ForwardState
from kvloom.exec.cpu.loader import LoadedModel, load_models
from kvloom.exec.sampler import prompt_logprobs, sample
from kvloom.kv.arena import Arena
from kvloom.offload.cpu.attention import CpuLoans
from kvloom.types.errors import ConfigError
from kvloom.types.geometry import I64, Geometry
from kvloom.types.job import Job, JobResult
from kvloom.types.request import ModelCard
from kvloom.types.spec import ModelSpec


class TorchExecutor:
    """Has one thread for each job that may run at the same time; a job's share is the number of cores it
    uses.

    The lowest free slot is taken first, so that whole-machine jobs keep to one thread, whose team of workers
    stays warm.
    """

    def __init__(self, models: dict[str, LoadedModel], arena: Arena, threads: int) -> None:
        self._models = models
        self.arena = arena
        self._views = {
            name: arena.view(model.geometry.head_dim, model.dtype) for name, model in models.items()
        }
        self._slots = [ThreadPoolExecutor(1, f"job-{i}") for i in range(threads)]
        self._free = list(range(threads))
        self.loans = CpuLoans(arena)
        self.compute = threads
        self.max_steps, self.lookahead = 1, 0
        self.blocks = arena.blocks

    @classmethod
    def load(
        cls,
        models: Sequence[ModelSpec],
        *,
        kv_bytes: int,
        block_bytes: int,
        threads: int,
        progress: Callable[[str], None] = lambda _: None,
    ) -> Self:
        """Loads every model, then commits the arena. Raises ConfigError."""
        torch.set_num_threads(threads)
        loaded = load_models(models, block_bytes, progress)
        progress("reserving the KV arena")
        return cls(loaded, commit_arena(loaded, kv_bytes, block_bytes), threads)

    @property
    def cards(self) -> dict[str, ModelCard]:
        return {name: model.card for name, model in self._models.items()}

    @property
    def geometries(self) -> dict[str, Geometry]:
        return {name: model.geometry for name, model in self._models.items()}

    def heads(self, model: str) -> int:
        """Returns the number of a model's query heads in all its layers; 0 if layers differ."""
        return self._models[model].heads

    async def lost(self) -> str:
        """Waits until no job can run any more, and returns why."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never  # jobs can, as long as this process lives

    def launch(self, job: Job) -> asyncio.Future[JobResult]:
        self._free.sort()
        slot = self._free.pop(0)
        future = asyncio.get_running_loop().run_in_executor(self._slots[slot], self._run, slot, job)
        future.add_done_callback(lambda _: self._free.append(slot))
        return future

    def steps_begun(self, job: Job) -> int:
        return job.steps

    def cut(self, job: Job) -> None:
        """Does nothing: each job has one step."""

    def close(self) -> None:
        """Waits for running jobs and ends the threads."""
        for slot in self._slots:
            slot.shutdown()

    def _run(self, slot: int, job: Job) -> JobResult:
        started = time.perf_counter()
        torch.set_num_threads(job.share)
        kept = job.kept
        with torch.inference_mode():
            with self.loans.attend(job) as part:
                state = ForwardState(job.plan, self._views[job.model], part.remote, part.polls)
                logits = self._forward(slot, job, kept, state)
            count = len(job.samples)
            tokens, reports = sample(logits[:count], job.samples)
            prompts = prompt_logprobs(logits[count : len(kept)], job.prompts)
        return JobResult(tokens, reports, prompts, time.perf_counter() - started, part.lost)

    def _forward(self, slot: int, job: Job, kept: I64, state: ForwardState) -> Tensor:
        """Returns the logits of the rows `kept` [R]: [R or more, V]. slot: that of the calling thread."""
        state.copy_pages(job.plan.copies)
        return self._models[job.model].forward(job.tokens, kept, state)


def commit_arena(models: Mapping[str, LoadedModel], kv_bytes: int, block_bytes: int, ranks: int = 1) -> Arena:
    """Returns one rank's part of `kv_bytes`. Raises ConfigError if that holds no page of a model."""
    blocks = kv_bytes // (ranks * block_bytes)
    for name, model in models.items():
        if model.geometry.blocks_per_page > blocks:
            raise ConfigError(
                f"kv_memory: {kv_bytes:,} bytes hold no page of {name}; "
                f"at least {model.geometry.blocks_per_page * block_bytes * ranks:,} are needed"
            )
    return Arena(blocks, block_bytes)
