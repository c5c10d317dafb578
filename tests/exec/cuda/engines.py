"""A real engine over the GPU's executor, which in CI runs on the CPU as its device."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvloom.engine.engine import Engine
from kvloom.exec.cuda.device import GpuDevice, host_device
from kvloom.exec.cuda.executor import GpuExecutor
from kvloom.exec.cuda.loader import load_executor
from kvloom.exec.cuda.operations import Operations, plain_operations
from kvloom.kv.arena import Arena
from kvloom.transfer.shared_memory import ShmTransport
from kvloom.types.spec import EngineSpec
from tests.engines import running_over
from tests.exec.cuda.devices import COMPUTE


@asynccontextmanager
async def running_on_device(
    spec: EngineSpec, device: GpuDevice | None = None, operations: Operations | None = None
) -> AsyncIterator[tuple[Engine, GpuExecutor]]:
    executor = load_executor(spec, device or host_device(COMPUTE), operations or plain_operations())
    async with running_executor(spec, executor) as engine:
        yield engine, executor


@asynccontextmanager
async def running_executor(spec: EngineSpec, executor: GpuExecutor) -> AsyncIterator[Engine]:
    """The engine while it runs, apart from others; afterwards law 1 and law 4 hold."""
    transport = ShmTransport(spec.unit, Arena(1, spec.block_bytes))
    async with running_over(spec, executor, transport) as engine:
        yield engine
