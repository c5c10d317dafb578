"""Jobs of one unit on several ranks of the CPU: the executor of the first rank, the worker of each other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from kvloom.exec.attention import ForwardState
from kvloom.exec.cpu.executor import TorchExecutor, commit_arena
from kvloom.exec.cpu.loader import LoadedModel, load_models
from kvloom.exec.parallel.group import RankGroup
from kvloom.exec.parallel.member import Member, check
from kvloom.exec.parallel.ranks import Ranks
from kvloom.exec.parallel.wire import StartRank, Step, ToldMap, ids_of
from kvloom.kv.arena import Arena
from kvloom.types.geometry import I64
from kvloom.types.job import Job
from kvloom.types.spec import EngineSpec


class ParallelExecutor(TorchExecutor):
    """Has its heads of every page, as each rank has, in an arena with as many blocks as those of the others,
    and runs each job on `share` cores as they do; this rank alone draws the tokens. A job that fails on its
    way to the logits ends the ranks."""

    def __init__(self, models: dict[str, LoadedModel], arena: Arena, threads: int, ranks: Ranks) -> None:
        super().__init__(models, arena, threads)
        self._ranks = ranks
        ranks.serve(self.geometries, arena.blocks)

    @classmethod
    def over(
        cls,
        spec: EngineSpec,
        folder: Path | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> Self:
        """Starts the other ranks, and loads with them. Pool and cores of the unit are shared out evenly.
        folder: see `Ranks`. Raises ConfigError, and Unavailable if a rank ends meanwhile."""
        size, threads = spec.tensor_parallel, spec.threads // spec.tensor_parallel
        torch.set_num_threads(threads)
        progress(f"starting {size} ranks")
        ranks = Ranks(spec, torch.device("cpu"), folder)
        with ranks.loading():
            loaded = load_models(spec.models, spec.block_bytes, progress, ranks)
            progress("reserving the KV arena")
            arena = commit_arena(loaded, spec.kv_bytes, spec.block_bytes, size)
            ranks.meet()
        return cls(loaded, arena, threads, ranks)

    async def lost(self) -> str:
        return await self._ranks.ended()

    def close(self) -> None:
        self._ranks.close()
        super().close()

    def _forward(self, slot: int, job: Job, kept: I64, state: ForwardState) -> Tensor:
        try:
            self._ranks.step(slot, job, kept)
            return super()._forward(slot, job, kept, state)
        except Exception as error:
            raise self._ranks.failed(error) from error


class CpuWorker:
    """Runs the steps that the first rank sends, and draws no tokens."""

    def __init__(self, group: RankGroup, models: dict[str, LoadedModel], arena: Arena, slots: int) -> None:
        self._group = group
        self._models = models
        self._views = {
            name: arena.view(model.geometry.head_dim, model.dtype) for name, model in models.items()
        }
        self._maps = {name: ToldMap(model.geometry, arena.blocks) for name, model in models.items()}
        self._slots = [ThreadPoolExecutor(1, f"job-{i}") for i in range(slots)]

    @classmethod
    def open(cls, begin: StartRank, member: Member) -> Self:
        spec = begin.spec
        torch.set_num_threads(begin.threads)
        member.join(begin, torch.device("cpu"))
        models = load_models(spec.models, spec.block_bytes, team=member)
        arena = Arena(spec.kv_bytes // (begin.size * spec.block_bytes), spec.block_bytes)
        return cls(member.group, models, arena, begin.slots)

    def start(self, step: Step) -> None:
        """Starts a step. What it says of the page map holds for those after it."""
        plan = self._maps[step.model].plan(step)
        state = ForwardState(plan, self._views[step.model])
        self._slots[step.slot].submit(self._run, step, state).add_done_callback(check)

    def _run(self, step: Step, state: ForwardState) -> None:
        torch.set_num_threads(step.share)
        self._group.enter(step.slot)
        tokens, kept = ids_of(step)
        with torch.inference_mode():
            state.copy_pages(state.plan.copies)
            self._models[step.model].forward(tokens, kept, state)


def load_executor(
    spec: EngineSpec, folder: Path | None = None, progress: Callable[[str], None] = lambda _: None
) -> TorchExecutor:
    """Returns the executor that the unit needs. Raises as the executors do."""
    if spec.tensor_parallel > 1:
        return ParallelExecutor.over(spec, folder, progress)
    return TorchExecutor.load(
        spec.models,
        kv_bytes=spec.kv_bytes,
        block_bytes=spec.block_bytes,
        threads=spec.threads,
        progress=progress,
    )
