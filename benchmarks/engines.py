"""Real engine processes, without a gateway before them."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from msgspec.structs import replace

from benchmarks.places import checkpoint
from kvloom.router.client import HttpEngineClient
from kvloom.serve.local import ENGINE_MODULE
from kvloom.serve.processes.child import ChildProcess
from kvloom.serve.processes.messages import EngineOrder, OrderRefused, Ready
from kvloom.types.spec import EngineSpec, ModelSpec

MODEL = "m"
CACHE_BYTES = 8 << 30  # of the files in a folder of kept prefixes


def spec_of(shape: str, unit: str, *, kv_bytes: int, threads: int) -> EngineSpec:
    return EngineSpec(
        models=(ModelSpec(name=MODEL, path=str(checkpoint(shape))),),
        kv_bytes=kv_bytes,
        block_bytes=16 << 10,
        policy="adbs",
        max_running=256,
        max_waiting=1024,
        chunk_tokens=512,
        threads=threads,
        unit=unit,
    )


@asynccontextmanager
async def engines(
    count: int, shape: str, *, kv_bytes: int = 1 << 30, threads: int = 1, cache_dir: Path | None = None
) -> AsyncIterator[list[HttpEngineClient]]:
    """Clients of `count` engines that serve one model of this shape, ready. cache_dir: where prefixes are
    kept, if they are to be."""
    secret = secrets.token_urlsafe(16)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        clients = []
        for i in range(count):
            unit = f"unit-{i}"
            path = str(Path(folder) / unit / "engine.sock")
            Path(path).parent.mkdir()
            component = await ChildProcess.start(unit, ENGINE_MODULE)
            stack.push_async_callback(ending, component)
            spec = spec_of(shape, unit, kv_bytes=kv_bytes, threads=threads)
            if cache_dir is not None:
                spec = replace(spec, cache_dir=str(cache_dir), cache_size=CACHE_BYTES)
            await component.order(EngineOrder(spec=spec, socket=path, secret=secret))
            await ready(component)
            clients.append(await stack.enter_async_context(HttpEngineClient(f"unix://{path}", secret=secret)))
        yield clients


async def ready(component: ChildProcess) -> None:
    async for report in component.reports():
        if isinstance(report, OrderRefused):
            raise RuntimeError(report.message)
        if isinstance(report, Ready):
            return
    raise RuntimeError(f"{component.name} did not start")


async def ending(component: ChildProcess) -> None:
    component.terminate()
    await component.ended()
