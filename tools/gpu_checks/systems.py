"""Three ways to serve several models on one GPU, over the same weights and the same memory.

Multiplexing: one engine, adbs, jobs side by side in partitions, one pool whose quotas move. Temporal: one
engine, one job at a time on the whole device, first come, first served, over the same pool (MuxServe,
section 4.1, gives its temporal baseline the unified cache too). Spatial: an engine for each model, whose
multiprocessors and blocks are its own and stay so, in proportion to its load."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from msgspec.structs import replace
from tools.gpu_checks.models import Ground, Shape, executor_of, make_models, parameters, running, spec_of
from torch import Tensor

from kvloom.engine.engine import Engine
from kvloom.exec.cuda.device import (
    STEP,
    CudaStream,
    GpuDevice,
    HostStream,
    PartitionLane,
    Partitions,
    try_out,
)
from kvloom.exec.cuda.executor import GpuExecutor
from kvloom.exec.cuda.operations import triton_operations
from kvloom.exec.loader import LoadedModel
from kvloom.kernels.driver import Driver, DriverError
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


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Split:
    """devices: one lane each. why: they may share multiprocessors all the same; else empty."""

    devices: list[GpuDevice]
    why: str = ""


def divided(whole: int, weights: Sequence[float]) -> list[int]:
    """`whole` parts in proportion to `weights`, at least one each; who is furthest below its due gets the
    next one."""
    parts = [1] * len(weights)
    if whole < len(parts):
        raise ValueError(f"want at least {len(parts)} parts, got {whole}")
    for _ in range(whole - len(parts)):
        due = [weight / part for weight, part in zip(weights, parts, strict=True)]
        parts[due.index(max(due))] += 1
    return parts


def split(device: GpuDevice, weights: Sequence[float]) -> Split:
    """A part of the device for each weight, in proportion, in whole groups of STEP multiprocessors; what is
    left of them is the largest part's. Where there are no green contexts, plain streams, which share all."""
    if device.torch.type != "cuda":
        sizes = divided(device.compute, weights)
        return Split([_of(device, PartitionLane(size, HostStream())) for size in sizes])
    try:
        return Split([_of(device, lane) for lane in _green(device.torch, weights)])
    except DriverError as error:
        sizes = [STEP * part for part in divided(device.compute // STEP, weights)]
        lanes = [PartitionLane(size, CudaStream.new(device.torch)) for size in sizes]
        return Split([_of(device, lane) for lane in lanes], f"no green contexts: {error}")


def _of(device: GpuDevice, lane: PartitionLane) -> GpuDevice:
    return GpuDevice(device.torch, lane.compute, Partitions(lane, []))


def shared_out(groups: Sequence[T], weights: Sequence[float]) -> list[list[T]]:
    """Each group to one of them, in proportion."""
    ends = list(accumulate(divided(len(groups), weights), initial=0))
    return [list(groups[first:end]) for first, end in pairwise(ends)]


def _green(device: torch.device, weights: Sequence[float]) -> list[PartitionLane]:
    """CUDA's driver API, cuDevResourceGenerateDesc: groups of one split may be joined again. What is left of
    the split goes to the largest part where the driver joins that, too. Raises DriverError."""
    driver = Driver()
    driver.enter(device.index)
    number = driver("cuDeviceGet", device.index)
    kind = driver.api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    everything = driver("cuDeviceGetDevResource", number, kind)
    most = int(everything.sm.smCount) // STEP
    groups, made, rest = driver("cuDevSmResourceSplitByCount", most, everything, 0, STEP)
    parts = shared_out(groups[: int(made)], weights)
    lanes = []
    for part in parts:
        if len(part) == max(map(len, parts)) and rest is not None and int(rest.sm.smCount):
            with suppress(DriverError):
                lanes.append(_lane(driver, device, number, [*part, rest]))
                rest = None
                continue
        lanes.append(_lane(driver, device, number, part))
    return lanes


def _lane(driver: Driver, device: torch.device, number: Any, resources: list[Any]) -> PartitionLane:
    """Its context lives as long as the process. Raises DriverError, also where the stream takes no work."""
    api = driver.api
    description = driver("cuDevResourceGenerateDesc", resources, len(resources))
    flags = int(api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
    context = driver("cuGreenCtxCreate", description, number, flags)
    flags = int(api.CUstream_flags.CU_STREAM_NON_BLOCKING)
    stream = driver("cuGreenCtxStreamCreate", context, flags, 0)
    wrapped = CudaStream(torch.cuda.ExternalStream(int(stream), device))  # type: ignore[no-untyped-call]
    try_out(driver, wrapped, device, triton_operations())
    return PartitionLane(sum(int(one.sm.smCount) for one in resources), wrapped)
