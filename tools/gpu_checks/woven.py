"""Weaving on one GPU: how fast a hot unit decodes, a part of whose attention a cold one does. Kernels alone
pass tasks on, or the cold unit's host launches them between its iterations (Weaver's baseline, control by the
CPU); or nothing is away.

Both units are engines of this process, each with its side of a partition and an arena of its own, so that
their kernels run at the same time without MPS. `benchmarks.weaving` does this between processes on CPUs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Final

from msgspec.structs import replace
from tools.gpu_checks.asking import many
from tools.gpu_checks.lag import Lag
from tools.gpu_checks.models import (
    LLAMA_8B,
    QWEN_4B,
    Ground,
    Shape,
    executor_of,
    make_models,
    running,
    spec_of,
)
from tools.gpu_checks.report import Figure
from torch import Tensor

from kvloom.engine.engine import Engine
from kvloom.exec.cuda.device import GpuDevice, PartitionLane, Partitions
from kvloom.offload.cuda import CudaOffloadBackend
from kvloom.transfer.cuda_ipc import CudaIpcTransport, DeviceMemory
from kvloom.transfer.target import WriteTarget
from kvloom.types.load import ModelLoad, UnitLoad
from kvloom.types.request import SamplingParams, StartGenerate
from kvloom.types.spec import Control
from kvloom.types.transfer import BlockCopies, DeviceEvent

HOT, COLD = "hot", "cold"
CONTROLS: Final[dict[Control, str]] = {
    "operators": "kernels pass tasks on",
    "iterations": "the cold unit's CPU passes tasks on",
}
WANTED: Final = 3.0  # × the hot unit's rate where the CPU controls
FLATTERED: Final = "the CPU's way shares one process and GIL with the hot unit, which flatters this"
_names = count()


@dataclass(frozen=True, slots=True)
class Effort:
    """hot, cold: sequences that decode at each. share: of the hot ones, those that are away. pages: lent.
    prompt, output: tokens of each. seconds, jobs: of a measurement, at least; after `slow` seconds `fewest`
    jobs are enough; patience: until so many are away, and for so many jobs."""

    hot: int = 12
    cold: int = 8
    share: float = 0.5
    pages: int = 800
    prompt: int = 1024
    output: int = 8192
    seconds: float = 3.0
    jobs: int = 8
    slow: float = 10.0
    fewest: int = 2
    patience: float = 20.0
    kv_bytes: int = 12 << 30
    most_running: int = 16
    chunk: int = 4096


class OneProcess:
    """Satisfies DeviceMemory for units of one process, which cannot map their own exports: a handle leads to
    the tensor itself. real: does the rest."""

    def __init__(self, real: DeviceMemory) -> None:
        self._real = real
        self._exports: dict[bytes, Tensor] = {}

    def export(self, memory: Tensor) -> bytes:
        handle = f"export {len(self._exports)}".encode()
        self._exports[handle] = memory
        return handle

    def map(self, handle: bytes) -> Tensor:
        return self._exports[handle]

    def mark(self) -> DeviceEvent:
        return self._real.mark()

    def copy(self, source: Tensor, target: Tensor, copies: BlockCopies, room: WriteTarget) -> None:
        self._real.copy(source, target, copies, room)


@dataclass(frozen=True, slots=True)
class Span:
    """rate: the hot unit's tokens a second; hot, cold: decode jobs a second of each; away: of the hot unit's
    tokens, those that were attended for elsewhere. jobs: of the hot unit, in all. lag: of the loop that both
    units share."""

    rate: float
    hot: float
    cold: float
    away: float
    jobs: int
    lag: str


def weaving(
    ground: Ground,
    memory: DeviceMemory,
    shapes: tuple[Shape, Shape] = (LLAMA_8B, QWEN_4B),
    effort: Effort | None = None,
) -> Iterator[Figure]:
    """shapes: of the hot and of the cold unit's model. memory: the device's."""
    found: dict[str, Span] = {}
    try:
        asyncio.run(_measure(found, ground, OneProcess(memory), shapes, effort or Effort()))
    finally:  # what was measured counts, whatever came then
        for name, span in found.items():
            note = (
                f"decode jobs/s: hot {span.hot:.1f} ({span.jobs} jobs), cold {span.cold:.1f}; "
                f"{span.away:.0%} of the tokens are away; {span.lag}"
            )
            yield Figure(name=f"hot unit, {name}", value=span.rate, unit="tokens/s", note=note)
    rates = [found[name].rate for name in CONTROLS.values()]
    name = "hot unit's rate, kernels pass tasks on / the CPU does"
    yield Figure(name=name, value=rates[0] / rates[1], unit="×", least=WANTED, note=FLATTERED)


async def _measure(
    found: dict[str, Span],
    ground: Ground,
    memory: OneProcess,
    shapes: tuple[Shape, Shape],
    effort: Effort,
) -> None:
    away = max(1, int(effort.hot * effort.share) - 1)
    async with (
        _unit(HOT, shapes[0], ground, memory, effort) as hot,
        _unit(COLD, shapes[1], ground, memory, effort) as cold,
        asyncio.TaskGroup() as group,
    ):
        tasks = [
            group.create_task(many(number, engine, _maker(model, effort)))
            for model, engine, number in ((HOT, hot, effort.hot), (COLD, cold, effort.cold))
        ]
        await _until(hot, effort, lambda load: _ready(load.models[HOT], effort.hot))
        await _until(cold, effort, lambda load: _ready(load.models[COLD], effort.cold))
        found["all at home"] = await _span(hot, cold, effort)
        for control, name in CONTROLS.items():
            terms = replace(hot.borrower.terms(HOT, effort.pages), control=control)
            hot.borrower.borrow(terms, cold.lender.lend(terms), 0.0)
            await _settled(cold, effort)
            hot.borrower.set_share(HOT, effort.share)
            await _until(hot, effort, lambda load: load.models[HOT].away >= away)
            found[name] = await _span(hot, cold, effort)
            if hot.borrower.loan(HOT) is None:
                raise RuntimeError("the loan has ended by itself; the log says why")
            hot.borrower.withdraw(HOT)
            await hot.borrower.over(HOT)
            await _until(cold, effort, lambda load: not load.lent_blocks)
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def _unit(
    name: str, shape: Shape, ground: Ground, memory: OneProcess, effort: Effort
) -> AsyncIterator[Engine]:
    executor = executor_of(
        make_models({name: shape}, ground),
        arena := ground.arena(effort.kv_bytes),
        ground,
        most_running=effort.most_running,
        chunk=effort.chunk,
        device=_side(ground.device, name),
    )
    transport = CudaIpcTransport(name, arena, memory)
    spec = spec_of(executor, "adbs", max_running=effort.most_running, chunk=effort.chunk, unit=name)
    async with running(executor, spec, transport, CudaOffloadBackend(executor, transport)) as engine:
        yield engine
    executor.close()


def _side(device: GpuDevice, name: str) -> GpuDevice:
    """Of the pair that is nearest to halves, the larger side for the hot unit; jobs of a unit take turns."""
    pairs = sorted(device.partitions.pairs, key=lambda pair: abs(pair[0].compute - pair[1].compute))
    cold, hot = sorted(pairs[0], key=lambda lane: lane.compute)
    lane: PartitionLane = hot if name == HOT else cold
    return GpuDevice(device.torch, lane.compute, Partitions(lane, []))


def _maker(model: str, effort: Effort) -> Callable[[int, int], StartGenerate]:
    def make(number: int, turn: int) -> StartGenerate:
        prompt = [300 + (number * 7919 + i * 104729) % 7800 for i in range(effort.prompt)]
        params = SamplingParams(max_tokens=effort.output, seed=number)
        request = f"{model}-{next(_names)}"
        return StartGenerate(model=model, request=request, prompt=prompt, sampling=params, interval=64)

    return make


def _ready(load: ModelLoad, number: int) -> bool:
    return load.running == number and load.output_tokens_total >= 4 * number


async def _until(engine: Engine, effort: Effort, holds: Callable[[UnitLoad], bool]) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(effort.patience):
        while True:
            if holds(await engine.load()):
                return
            await asyncio.sleep(0.02)


async def _settled(cold: Engine, effort: Effort) -> None:
    """Its steps poll, and are recorded. Nothing waits for them yet: a kernel that waits, in the same process,
    would keep the driver from loading those that it waits for."""
    begun = (await cold.load()).models[COLD].decode_jobs_total
    await _until(cold, effort, lambda load: load.models[COLD].decode_jobs_total >= begun + 4)


async def _span(hot: Engine, cold: Engine, effort: Effort) -> Span:
    async def now() -> tuple[float, ModelLoad, ModelLoad]:
        loads = (await hot.load()).models[HOT], (await cold.load()).models[COLD]
        return time.perf_counter(), *loads

    lag = Lag()
    with lag.watched():
        began, first, before = await now()
        await asyncio.sleep(effort.seconds)

        def enough(load: UnitLoad) -> bool:
            slow = time.perf_counter() - began >= effort.slow
            jobs = load.models[HOT].decode_jobs_total - first.decode_jobs_total
            return jobs >= (effort.fewest if slow else effort.jobs)

        await _until(hot, effort, enough)
        ended, last, after = await now()
    took, tokens = ended - began, last.output_tokens_total - first.output_tokens_total
    return Span(
        rate=tokens / took,
        hot=(last.decode_jobs_total - first.decode_jobs_total) / took,
        cold=(after.decode_jobs_total - before.decode_jobs_total) / took,
        away=(last.away_tokens_total - first.away_tokens_total) / max(tokens, 1),
        jobs=last.decode_jobs_total - first.decode_jobs_total,
        lag=lag.told(),
    )
