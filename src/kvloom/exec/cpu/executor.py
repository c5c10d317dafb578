"""The executors that run jobs with torch on this machine's cores, one rank's or one of several, and the
worker of each other rank."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from kvloom.exec.adapters import LayerName
from kvloom.exec.attention import Forward, ForwardState, Scoring
from kvloom.exec.cpu.adapted import PackedAdapter, adapted_rows
from kvloom.exec.cpu.adapter_memory import CpuAdapters
from kvloom.exec.cpu.cores import ThreadTeam
from kvloom.exec.cpu.decoder import FusedDecoder, fuse_decoder
from kvloom.exec.cpu.fuse import fuse_on_cpu, round_inputs
from kvloom.exec.cpu.number_format import choose_format, own_format
from kvloom.exec.cpu.weights import CpuWeights, SleepingModel, put_to_sleep
from kvloom.exec.loader import LoadedModel, count_blocks, least_bytes, load_models
from kvloom.exec.parallel.group import RankGroup
from kvloom.exec.parallel.ranks import Member, Ranks, check
from kvloom.exec.parallel.wire import StartRank, Step, ToldMap
from kvloom.exec.sampler import prompt_logprobs, sample
from kvloom.exec.widened import can_widen
from kvloom.kernels.cpu.draw import prepare as prepare_draws
from kvloom.kernels.cpu.half import narrow_formats
from kvloom.kv.arena import Arena, ArenaMemory, ArenaPart, map_arena
from kvloom.kv.memory import available_memory, enter_pages, return_free_memory
from kvloom.offload.cpu.attention import CpuLoans
from kvloom.types.errors import ConfigError
from kvloom.types.geometry import I64, Geometry, KVDtype
from kvloom.types.job import DraftSteps, Job, JobResult
from kvloom.types.request import ModelCard
from kvloom.types.spec import RESERVE, EngineSpec, ModelSpec, shared_bytes

_SMALL: Final = 1 << 20  # bytes of a weight that is not worth a mapping


class CpuTarget:
    """A CPU as the target of loading: models compute in float32, over weights of 32 bits in oneDNN's layouts
    or of 16 bits in panels. A model that cannot have panels computes in the format of its weights."""

    def check_floats(self) -> None:
        raise ConfigError(
            "its weights are floats of 8 bits (FP8), which CPUs do not multiply; a GPU, or `kvloom quantize "
            "--to int8` of the checkpoint that they were made of, is right"
        )

    def check_pooling_model(self) -> None:
        """Does nothing: models that make vectors are served."""

    def own_format(self, config: Any, matrices: Callable[[], Set[str]]) -> torch.dtype:
        return own_format(config, matrices)

    def choose_format(self, own: torch.dtype, outline: nn.Module, say: Callable[[str], None]) -> torch.dtype:
        return choose_format(own, outline, say)

    def check_room(self, size: int) -> None:
        free = available_memory()
        if size > free:
            raise ConfigError(
                f"its weights take {size:,} bytes of memory, and {free:,} are available here; a smaller "
                "model, a half precision or a larger machine is right"
            )

    def widens(self, outline: nn.Module, dtype: torch.dtype) -> bool:
        return dtype in narrow_formats() and can_widen(outline)

    def kv_dtype(self, wanted: KVDtype, dtype: torch.dtype) -> torch.dtype:
        if wanted == "float8_e4m3fn":
            raise ConfigError(f"kv_dtype: {wanted} on a CPU, whose kernels attend over none; int8 is right")
        return dtype if wanted == "auto" else getattr(torch, wanted)

    def place(self, module: nn.Module) -> None:
        """Does nothing: weights are read from the mapped files."""

    def fuse(self, module: nn.Module) -> None:
        fuse_on_cpu(module)

    def settle(self, module: nn.Module) -> None:
        """Copies what is small out of the mapped files. Large weights that are not packed stay in them."""
        for left in module.parameters():
            if left.nbytes < _SMALL or not left.is_contiguous():
                left.data = left.data.clone()

    def check_scorings(self, scorings: Mapping[int, Scoring]) -> None:
        """Does nothing: the kernels take all of them."""

    def fuse_decoder(
        self, module: nn.Module, scorings: Mapping[int, Scoring], geometry: Geometry
    ) -> Forward | None:
        return fuse_decoder(module, scorings, geometry)

    def round_inputs(self, module: nn.Module) -> None:
        round_inputs(module)


CPU = CpuTarget()


def _views(models: Mapping[str, LoadedModel], arena: ArenaMemory) -> dict[str, Tensor]:
    """Returns the arena as each model sees it."""
    return {name: arena.view(model.geometry.head_dim, model.kv_dtype) for name, model in models.items()}


def _shapes(model: LoadedModel) -> Mapping[LayerName, tuple[int, int]] | None:
    """Returns the shapes of the linear layers that adapters may change; None if it has none."""
    return model.forward.shapes if isinstance(model.forward, FusedDecoder) else None


class TorchExecutor:
    """Runs jobs with torch, by a thread for each that may run at the same time; a job's share is the number
    of cores it uses.

    The lowest free slot is taken first, so that whole-machine jobs keep to one thread, whose team of workers
    stays warm.
    """

    def __init__(
        self,
        models: dict[str, LoadedModel],
        arena: Arena,
        threads: int,
        weights: CpuWeights | None = None,
    ) -> None:
        self._models = models
        self.arena = arena
        self.weights = weights
        self._views = _views(models, arena)
        self.adapters: CpuAdapters | None = None
        self._slots = [ThreadPoolExecutor(1, f"job-{i}") for i in range(threads)]
        self._free = list(range(threads))
        self._teams = [ThreadTeam() for _ in range(threads)]
        self.loans = CpuLoans(arena)
        self.compute = threads
        self.max_steps, self.lookahead = 1, 0
        self.blocks = arena.blocks
        prepare_draws()

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
        loaded = load_models(models, block_bytes, CPU, progress)
        return_free_memory()
        progress("reserving the KV arena")
        made = cls(loaded, Arena(count_blocks(loaded, kv_bytes, block_bytes, 1), block_bytes), threads)
        made._prove_adapters(models, progress)
        return made

    @classmethod
    def within_budget(cls, spec: EngineSpec, progress: Callable[[str], None] = lambda _: None) -> Self:
        """Loads every model and puts it to sleep before the next one is loaded. Weights and pool share the
        arena's blocks from then on. Raises ConfigError."""
        torch.set_num_threads(spec.threads)
        blocks = shared_bytes(spec.kv_bytes) // spec.block_bytes
        asleep: dict[str, SleepingModel] = {}

        def require(name: str, weights: int, page: int) -> None:
            needed = -(-weights // spec.block_bytes) + page
            if needed > blocks:
                least = needed * spec.block_bytes * RESERVE // (RESERVE - 1)
                raise ConfigError(
                    f"memory: {spec.kv_bytes:,} bytes do not hold {name}, whose weights take "
                    f"{weights:,}, and a page of its K and V; at least {least:,} are needed"
                )

        def finish(name: str, model: LoadedModel) -> None:
            if model.pooling_model is not None:
                raise ConfigError(
                    f"models.{name}: a model that makes vectors does not sleep; kv_memory is right"
                )
            asleep[name] = put_to_sleep(name, (model.module, model.forward), Path(spec.sleep_dir))
            return_free_memory()
            require(name, asleep[name].bytes, model.geometry.blocks_per_page)

        for model in spec.models:  # before any is loaded, by what is certain
            require(model.name, least_bytes(model, CPU), 1)
        loaded = load_models(spec.models, spec.block_bytes, CPU, progress, finish=finish)
        arena = Arena(blocks, spec.block_bytes, committed=False)
        made = cls(loaded, arena, spec.threads, CpuWeights(asleep, arena))
        made._prove_adapters(spec.models, progress)
        return made

    def _prove_adapters(self, models: Sequence[ModelSpec], progress: Callable[[str], None]) -> None:
        """Serves adapters from now on, those of the models among them. Raises ConfigError."""
        shapes = {name: _shapes(model) for name, model in self._models.items()}
        self.adapters = CpuAdapters(shapes, self.arena)
        self.adapters.prove(models, progress)
        return_free_memory()

    @property
    def cards(self) -> dict[str, ModelCard]:
        return {name: model.card for name, model in self._models.items()}

    @property
    def geometries(self) -> dict[str, Geometry]:
        return {name: model.geometry for name, model in self._models.items()}

    @property
    def identities(self) -> dict[str, str]:
        """Returns the identity of each model's K and V, which tells them from those of others."""
        return {name: model.identity for name, model in self._models.items()}

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
        adapters = self.adapters.having(job.model, job.adapters) if self.adapters and job.adapters else {}
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._slots[slot], self._run, slot, job, adapters)
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
        if self.weights is not None:
            self.weights.close()
        if self.adapters is not None:
            self.adapters.close()

    def _run(self, slot: int, job: Job, adapters: Mapping[str, PackedAdapter]) -> JobResult:
        team = self._teams[slot]
        team.begin(job.share)
        try:
            return self._compute(slot, job, adapters)
        finally:
            team.end()

    def _compute(self, slot: int, job: Job, adapters: Mapping[str, PackedAdapter]) -> JobResult:
        started = time.perf_counter()
        pooling_model = self._models[job.model].pooling_model
        if pooling_model is not None:
            with torch.inference_mode():
                vectors = pooling_model(job.tokens, job.plan.appends, job.pairs).numpy()
            made = [vector.astype("<f4").tobytes() for vector in vectors]
            return JobResult([], [], [], time.perf_counter() - started, vectors=made)
        kept, draft_seconds = job.kept, 0.0
        with torch.inference_mode():
            if job.draft_steps is not None:
                self._draft(slot, job.draft_steps, job.share)
                draft_seconds = time.perf_counter() - started
            with self.loans.attend(job) as part:
                state = ForwardState(job.plan, self._views[job.model], part.remote, part.polls)
                logits = self._forward(slot, job, kept, state, adapters)
            count = len(job.samples)
            tokens, reports = sample(logits[:count], job.samples)
            prompts = prompt_logprobs(logits[count : len(kept)], job.prompts)
        seconds = time.perf_counter() - started
        return JobResult(tokens, reports, prompts, seconds, part.lost, draft_seconds=draft_seconds)

    def _draft(self, slot: int, draft_steps: DraftSteps, share: int) -> None:
        """Runs the steps of the draft model."""
        for number in range(draft_steps.steps):
            step, ends = draft_steps.step(number, share)
            state = ForwardState(step.plan, self._views[step.model])
            logits = self._forward(slot, step, ends, state, {})
            draft_steps.take(number, logits[: len(ends)].argmax(1).numpy())

    def _forward(
        self,
        slot: int,
        job: Job,
        kept: I64,
        state: ForwardState,
        adapters: Mapping[str, PackedAdapter],
    ) -> Tensor:
        """Returns the logits of the rows `kept` [R]: [R or more, V]. slot: that of the calling thread."""
        state.copy_pages(job.plan.copies)
        forward = self._models[job.model].forward
        if adapters and isinstance(forward, FusedDecoder):
            rows = adapted_rows(job.adapters, job.plan.appends, adapters)
            return forward(job.tokens, kept, state, rows)
        return forward(job.tokens, kept, state)


class ParallelExecutor(TorchExecutor):
    """Runs jobs as the first of several ranks. Each rank has its heads of every page in a part of the unit's
    arena, all with as many blocks, and runs each job on `share` cores; this one alone draws the tokens. A job
    that fails on its way to the logits ends the ranks."""

    def __init__(
        self, models: dict[str, LoadedModel], arena: Arena, blocks: int, threads: int, ranks: Ranks
    ) -> None:
        """arena: that of all ranks, of `blocks` blocks each."""
        super().__init__(models, arena, threads)
        self._views = _views(models, ArenaPart.of(arena.bytes, 0, blocks, arena.block_bytes))
        self.blocks = blocks
        self._ranks = ranks
        ranks.serve(self.geometries, blocks)

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
            loaded = load_models(spec.models, spec.block_bytes, CPU, progress, ranks)
            progress("reserving the KV arena")
            blocks = count_blocks(loaded, spec.kv_bytes, spec.block_bytes, size)
            arena = Arena(size * blocks, spec.block_bytes)
            ranks.meet(arena.path)
        return cls(loaded, arena, blocks, threads, ranks)

    async def lost(self) -> str:
        return await self._ranks.ended()

    def close(self) -> None:
        self._ranks.close()
        super().close()

    def _forward(
        self,
        slot: int,
        job: Job,
        kept: I64,
        state: ForwardState,
        adapters: Mapping[str, PackedAdapter],
    ) -> Tensor:
        try:
            self._ranks.step(slot, job, kept)
            state.behind = 1
            logits = super()._forward(slot, job, kept, state, adapters)
            state.send_rest()
            return logits
        except Exception as error:
            raise self._ranks.failed(error) from error


class CpuWorker:
    """Runs the steps that the first rank sends, and draws no tokens."""

    def __init__(
        self, group: RankGroup, models: dict[str, LoadedModel], arena: ArenaPart, slots: int
    ) -> None:
        self._group = group
        self._models = models
        self._views = _views(models, arena)
        self._maps = {name: ToldMap(model.geometry, arena.blocks) for name, model in models.items()}
        self._slots = [ThreadPoolExecutor(1, f"job-{i}") for i in range(slots)]

    @classmethod
    def open(cls, begin: StartRank, member: Member) -> Self:
        spec = begin.spec
        torch.set_num_threads(begin.threads)
        member.join(begin, torch.device("cpu"))
        models = load_models(spec.models, spec.block_bytes, CPU, team=member)
        member.meet()
        blocks = count_blocks(models, spec.kv_bytes, spec.block_bytes, begin.size)
        arena = ArenaPart.of(map_arena(member.arena), begin.rank, blocks, spec.block_bytes)
        enter_pages(arena.bytes.data_ptr(), arena.bytes.nbytes)
        return cls(member.group, models, arena, begin.slots)

    def start(self, step: Step) -> None:
        """Starts a step. Its changes of the page map hold for later steps, too."""
        plan = self._maps[step.model].plan(step)
        state = ForwardState(plan, self._views[step.model])
        self._slots[step.slot].submit(self._run, step, state).add_done_callback(check)

    def _run(self, step: Step, state: ForwardState) -> None:
        torch.set_num_threads(step.share)
        self._group.enter(step.slot)
        with torch.inference_mode():
            state.copy_pages(state.plan.copies)
            self._models[step.model].forward(step.array("tokens"), step.array("kept"), state)


def load_executor(
    spec: EngineSpec, folder: Path | None = None, progress: Callable[[str], None] = lambda _: None
) -> TorchExecutor:
    """Returns the executor that the unit needs. Raises as the executors do."""
    if spec.tensor_parallel > 1:
        return ParallelExecutor.over(spec, folder, progress)
    if spec.sleep_dir:
        return TorchExecutor.within_budget(spec, progress)
    return TorchExecutor.load(
        spec.models,
        kv_bytes=spec.kv_bytes,
        block_bytes=spec.block_bytes,
        threads=spec.threads,
        progress=progress,
    )
