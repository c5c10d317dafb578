"""Three ways to serve several models on one GPU, over the same weights and the same memory.

Multiplexing: one engine, adbs, jobs side by side in partitions, one pool whose quotas move. Temporal: one
engine, one job at a time on the whole device, first come, first served, over the same pool (MuxServe,
section 4.1, gives its temporal baseline the unified cache too). Spatial: an engine for each model, whose
multiprocessors and blocks are its own and stay so, in proportion to its load.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from tools.gpu_checks.lanes import split
from tools.gpu_checks.models import Ground, Shape, executor_of, make_models, parameters, running, spec_of
from torch import Tensor

from kvloom.engine.engine import Engine
from kvloom.exec.cuda.executor import GpuExecutor
from kvloom.exec.loader import LoadedModel
from kvloom.kv.arena import ArenaMemory, view_blocks
from kvloom.kv.quota import initial_quotas
from kvloom.types.spec import Policy

Serving = Callable[[], AbstractAsyncContextManager[Mapping[str, Engine]]]

MULTIPLEXING, SPATIAL, TEMPORAL = "multiplexing", "spatial", "temporal"


class Part:
    """`blocks` blocks of an arena, from block `first` on, as an arena of their own."""

    def __init__(self, whole: ArenaMemory, first: int, blocks: int) -> None:
        self.blocks, self.block_bytes = blocks, whole.block_bytes
        self.bytes: Tensor = whole.bytes[first * self.block_bytes : (first + blocks) * self.block_bytes]

    def view(self, head_dim: int, dtype: torch.dtype) -> Tensor:
        return view_blocks(self.bytes, self.block_bytes, head_dim, dtype)


@dataclass(frozen=True, slots=True)
class Stage:
    """What all of them have. shared: over the whole device and arena. most_running: of each model."""

    ground: Ground
    loaded: Mapping[str, LoadedModel]
    arena: ArenaMemory
    shared: GpuExecutor
    most_running: int
    chunk: int

    @classmethod
    def make(
        cls, shapes: Mapping[str, Shape], ground: Ground, kv_bytes: int, most_running: int, chunk: int
    ) -> Stage:
        loaded, arena = make_models(shapes, ground), ground.arena(kv_bytes)
        shared = executor_of(loaded, arena, ground, most_running=most_running, chunk=chunk)
        return cls(ground, loaded, arena, shared, most_running, chunk)

    @contextmanager
    def systems(self, rates: Mapping[str, float]) -> Iterator[tuple[dict[str, Serving], Apart]]:
        """By name, and the spatial one's executors. rates: each model's share of the requests."""
        apart = Apart(self, rates)
        systems: dict[str, Serving] = {
            MULTIPLEXING: lambda: self._together("adbs", rates),
            TEMPORAL: lambda: self._together("fcfs", rates),
            SPATIAL: apart.serving,
        }
        try:
            yield systems, apart
        finally:
            apart.close()

    def close(self) -> None:
        self.shared.close()

    @asynccontextmanager
    async def _together(
        self, policy: Policy, rates: Mapping[str, float]
    ) -> AsyncIterator[Mapping[str, Engine]]:
        spec = spec_of(self.shared, policy, max_running=self.most_running, chunk=self.chunk)
        models = tuple(replace(model, rate=rates[model.name]) for model in spec.models)
        async with running(self.shared, replace(spec, models=models)) as engine:
            yield dict.fromkeys(self.loaded, engine)


class Apart:
    """The spatial system: an executor for each model, made when it first serves, because what is wrong with
    the split must not cost the others."""

    def __init__(self, stage: Stage, rates: Mapping[str, float]) -> None:
        self.executors: dict[str, GpuExecutor] = {}
        self.note = ""  # what is to be said of the split
        self._stage = stage
        self._rates = rates

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Mapping[str, Engine]]:
        if not self.note:
            self.make()
        form = {"max_running": self._stage.most_running, "chunk": self._stage.chunk}
        async with AsyncExitStack() as stack:
            engines = {}
            for name, executor in self.executors.items():
                spec = spec_of(executor, "partitioned", unit=name, **form)
                engines[name] = await stack.enter_async_context(running(executor, spec))
            yield engines

    def make(self) -> None:
        """Multiprocessors by rate × weights, which is what a step reads; blocks by rate × blocks a token, as
        a pool's quotas begin."""
        stage, rates = self._stage, self._rates
        names = list(stage.loaded)
        lanes = split(stage.ground.device, [rates[name] * parameters(stage.loaded[name]) for name in names])
        geometries = {name: model.geometry for name, model in stage.loaded.items()}
        blocks = initial_quotas(stage.arena.blocks, geometries, rates)
        if sum(blocks.values()) > stage.arena.blocks:
            raise ValueError(
                f"a pool of {stage.arena.blocks} blocks is too small to be split; a larger one is right"
            )
        form = {"most_running": stage.most_running, "chunk": stage.chunk}
        first = 0
        for name, device in zip(names, lanes.devices, strict=True):
            arena = Part(stage.arena, first, blocks[name])
            first += blocks[name]
            loaded = {name: stage.loaded[name]}
            self.executors[name] = executor_of(loaded, arena, stage.ground, device=device, **form)
        parts = (f"{name} {device.compute}" for name, device in zip(names, lanes.devices, strict=True))
        self.note = f"; multiprocessors {', '.join(parts)}{'; ' if lanes.why else ''}{lanes.why}"

    def close(self) -> None:
        """With its recordings."""
        for executor in self.executors.values():
            executor.close()
        self.executors = {}
