"""One engine with a model of random weights in a process of its own: `python -m tools.gpu_checks.unit`.

It reads what it is to be, one line of JSON, from its input, serves the verbs on a socket file as a unit's
process does, says `ready`, and ends with its input.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import msgspec
from msgspec import Struct
from tools.gpu_checks.models import (
    LLAMA_1B,
    LLAMA_8B,
    QWEN_4B,
    Ground,
    Shape,
    cuda_ground,
    executor_of,
    make_models,
    running,
    spec_of,
)

from kvloom.api.verbs import create_verbs
from kvloom.router.client import HttpEngineClient
from kvloom.serve.server import HttpServer
from kvloom.transfer.cuda_ipc import CudaIpcTransport, CudaMemory, DeviceMemory

MODEL: Final = "m"
MODULE: Final = "tools.gpu_checks.unit"
SHAPES: Final[Mapping[str, Shape]] = {"8B": LLAMA_8B, "4B": QWEN_4B, "1B": LLAMA_1B}
_READY: Final = b"ready\n"


class Setup(Struct, frozen=True, kw_only=True):
    """shape: by name. socket: a path."""

    unit: str
    shape: str
    kv_bytes: int
    most_running: int
    chunk: int
    socket: str
    secret: str


def main(
    open_ground: Callable[[], Ground], shapes: Mapping[str, Shape], memory: Callable[[Ground], DeviceMemory]
) -> None:
    """memory: as the KV plane is to see the ground's."""
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=Setup)
    ground = open_ground()
    loaded = make_models({MODEL: shapes[setup.shape]}, ground)
    arena = ground.arena(setup.kv_bytes)
    form: dict[str, Any] = {"chunk": setup.chunk}
    executor = executor_of(loaded, arena, ground, most_running=setup.most_running, **form)
    transport = CudaIpcTransport(setup.unit, arena, memory(ground))
    spec = spec_of(executor, "adbs", max_running=setup.most_running, unit=setup.unit, **form)

    async def serve() -> None:
        async with running(executor, spec, transport) as engine:
            server = HttpServer(
                create_verbs(engine, secret=setup.secret),
                unix=setup.socket,
                grace=1,
                ready=lambda: print("ready", flush=True),
            )
            serving = asyncio.create_task(server.serve())
            await asyncio.to_thread(sys.stdin.buffer.read)
            server.end()
            await serving

    asyncio.run(serve())
    executor.close()


@asynccontextmanager
async def units(
    setups: Sequence[Setup], patience: float, module: str = MODULE
) -> AsyncIterator[list[HttpEngineClient]]:
    """Their clients, once all serve; they start at the same time. Raises RuntimeError where one does not
    start, TimeoutError where that takes more than `patience` seconds."""
    async with AsyncExitStack() as stack:
        processes = [await stack.enter_async_context(_process(setup, module)) for setup in setups]
        async with asyncio.timeout(patience):
            for setup, process in zip(setups, processes, strict=True):
                await _ready(setup.unit, process)
        yield [
            await stack.enter_async_context(HttpEngineClient(f"unix://{one.socket}", secret=one.secret))
            for one in setups
        ]


@asynccontextmanager
async def _process(setup: Setup, module: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(setup) + b"\n")
    try:
        yield process
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _ready(name: str, process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    while (line := await process.stdout.readline()) != _READY:  # before it, what it tells of loading
        if not line:
            raise RuntimeError(f"{name} did not start; what it said is above")


if __name__ == "__main__":
    main(cuda_ground, SHAPES, lambda ground: CudaMemory(ground.device.torch))
