"""How long a request that moves from one engine to another on this GPU keeps its caller waiting: what
`benchmarks.downtime` does on CPUs, between two processes whose arenas are mapped by CUDA IPC.

`python -m tools.gpu_checks.moving` is one of the processes, an engine with a model of random weights. It
reads what it is to be, one line of JSON, from its input, serves the verbs on a socket file as a process of a
unit does, says `ready`, and ends with its input.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
from benchmarks.downtime import Found, live
from benchmarks.moving_pair import cold, paired, prompt_of
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
from tools.gpu_checks.report import Figure

from kvloom.api.verbs import create_verbs
from kvloom.router.client import HttpEngineClient
from kvloom.serve.server import HttpServer
from kvloom.transfer.cuda_ipc import CudaIpcTransport, CudaMemory, DeviceMemory
from kvloom.types.client import EngineClient

MODEL: Final = "m"
MODULE: Final = "tools.gpu_checks.moving"
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


PARTS: Final = ("hold", "send", "start", "last")  # of the gap


@dataclass(frozen=True, slots=True)
class Effort:
    """length: tokens of the request that moves, and its context; beside: requests that decode at each engine
    meanwhile; patience: seconds until both engines serve."""

    shape: str = "8B"
    length: int = 8192
    context: int = 16000
    beside: int = 8
    rounds: int = 3
    kv_bytes: int = 8 << 30
    most_running: int = 16
    chunk: int = 4096
    patience: float = 60.0


def moving(effort: Effort | None = None) -> Iterator[Figure]:
    effort = effort or Effort()
    yield from told(asyncio.run(_between_processes(effort)), effort)


def told(found: Sequence[Found], effort: Effort) -> Iterator[Figure]:
    downtime, step = (median(getattr(one, what) for one in found) * 1e3 for what in ("downtime", "step"))
    parts = ", ".join(f"{part} {median(getattr(one, part) for one in found) * 1e3:.1f}" for part in PARTS)
    yield Figure(
        name=f"a request of {effort.length} tokens moves: downtime, against a decode step",
        value=downtime,
        unit="ms",
        most=step,
        note=f"the step {step:.1f} ms; of the gap: {parts} ms; {effort.beside} others at each engine, two "
        "processes on one GPU",
    )
    slower = 100 * max(one.slower for one in found)
    yield Figure(name="others slower while it moves, at worst", value=slower, unit="%")
    whole = median(one.whole for one in found) * 1e3
    yield Figure(name="from the order to its first token there", value=whole, unit="ms")


async def _between_processes(effort: Effort) -> list[Found]:
    with tempfile.TemporaryDirectory() as folder:
        secret = secrets.token_urlsafe(16)
        setups = [setup(unit, effort, Path(folder), secret) for unit in ("source", "target")]
        async with units(setups, effort.patience) as (source, target):
            return await moves(source, target, effort)


def setup(unit: str, effort: Effort, folder: Path, secret: str) -> Setup:
    return Setup(
        unit=unit,
        shape=effort.shape,
        kv_bytes=effort.kv_bytes,
        most_running=effort.most_running,
        chunk=effort.chunk,
        socket=str(folder / unit),
        secret=secret,
    )


async def moves(source: EngineClient, target: EngineClient, effort: Effort) -> list[Found]:
    """The first round, in which memory is touched and kernels are loaded, is left out."""
    found = []
    async with paired(source, target, effort.beside, effort.context // 4) as on:
        prompt = prompt_of(effort.length)
        for _ in range(effort.rounds + 1):
            await cold(on)
            found.append(await live(on, prompt, effort.context))
    return found[1:]


if __name__ == "__main__":
    main(cuda_ground, SHAPES, lambda ground: CudaMemory(ground.device.torch))
