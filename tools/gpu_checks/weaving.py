"""Weaving on one GPU: how fast a hot unit decodes, a part of whose attention a cold one does. Kernels alone
pass tasks on, or the cold unit's host launches them between its iterations (Weaver's baseline, control by the
CPU); or nothing is away.

Both units are engines of this process, each with its side of a partition and an arena of its own, so that
their kernels run at the same time without MPS. `benchmarks.weaving` does this between processes on CPUs.

A mailbox between two sides is measured alone, too: that tasks are done, how long one takes, and what a poll
costs that finds none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import torch
from msgspec.structs import replace
from tools.gpu_checks.models import (
    LLAMA_8B,
    QWEN_4B,
    Ground,
    Lag,
    Shape,
    executor_of,
    make_models,
    many,
    running,
    spec_of,
)
from tools.gpu_checks.report import Figure
from torch import Tensor

from kvloom.engine.engine import Engine
from kvloom.exec.cuda.device import GpuDevice, PartitionLane, Partitions
from kvloom.kernels import mailbox_reference
from kvloom.kernels.mailbox import BorrowerState, LenderState, LentArena, MailboxTensors
from kvloom.kernels.reference import block_view
from kvloom.offload.cuda import CudaOffloadBackend
from kvloom.offload.memory.device import LenderDeviceMailbox
from kvloom.offload.memory.mailbox import START, MailboxForm
from kvloom.transfer.cuda_ipc import CudaIpcTransport, DeviceMemory
from kvloom.transfer.target import WriteTarget
from kvloom.types.load import ModelLoad, UnitLoad
from kvloom.types.request import SamplingParams, StartGenerate
from kvloom.types.spec import Control
from kvloom.types.transfer import BlockCopies, DeviceEvent

_BLOCK = 16384
_TASKS = 64
_LOOKS = 200_000  # for two tenths of a second: the other side is not ready at once
_SERVED = 20_000
_SPARE = 8  # launches of which a program finds its task done by others, and waits for the next


@dataclass(frozen=True, slots=True)
class Kernels:
    """The three that work a mailbox, as their twins in `kernels/mailbox_reference.py` say."""

    serve: Callable[..., None]
    post: Callable[..., None]
    collect: Callable[..., None]

    @classmethod
    def triton(cls) -> Kernels:
        from kvloom.kernels.cuda.offload_ask import collect, post  # noqa: PLC0415 -- it compiles for a GPU
        from kvloom.kernels.cuda.offload_serve import serve  # noqa: PLC0415

        return cls(serve, post, collect)


class Loan:
    """Of one layer: rows of `context` tokens, random."""

    def __init__(self, form: MailboxForm, dtype: Any, device: torch.device, context: int) -> None:
        self.mailbox: MailboxTensors = LenderDeviceMailbox(form, dtype, device).tensors
        kind = getattr(torch, dtype)
        self.lender_state, self.borrower_state = (
            LenderState(START, self.mailbox),
            BorrowerState(START, device),
        )
        count = form.pages * form.kv_heads
        memory = torch.randn(count * _BLOCK // kind.itemsize, device=device).to(kind).view(torch.uint8)
        self.lent = LentArena(
            torch.arange(count, dtype=torch.int32, device=device),
            block_view(memory, _BLOCK, form.head_dim, kind),
        )
        self.mailbox.lengths.fill_(context)
        self.mailbox.map.view(-1).copy_(self.lent.blocks)
        pages = torch.arange(form.rows * form.width, dtype=torch.int32, device=device)
        self.mailbox.tables.copy_(pages.view(form.rows, form.width))
        self.mailbox.head[0, :2] = torch.tensor([1, form.rows], dtype=torch.int32)
        self.borrower_state.step.copy_(torch.tensor([1, form.rows, 0], dtype=torch.int32))
        heads = form.heads, form.kv_heads, form.kv_heads
        self.asked = [torch.randn(form.rows, n, form.head_dim, device=device).to(kind) for n in heads]
        self.out = torch.empty_like(self.asked[0])
        self.scale = form.head_dim**-0.5


def between_sides(device: GpuDevice) -> list[Figure]:
    """Raises AssertionError where a task is not done, or not rightly."""
    form = MailboxForm(2, 16, 32, 512, 1, 32, 8, 128)
    loan = Loan(form, "bfloat16", device.torch, 1000)
    hot, cold = (device.partitions.pairs or [(device.partitions.whole,) * 2])[0]
    kernels = Kernels.triton()
    right(loan, kernels, hot, cold, close=2e-2)
    return [idle(loan, kernels, cold), busy(loan, kernels, hot, cold)]


def right(loan: Loan, kernels: Kernels, hot: PartitionLane, cold: PartitionLane, close: float) -> None:
    """Tasks one by one, both ends waiting on the device."""
    q, k, v = loan.asked
    for _ in range(3):
        with hot.entered():
            kernels.post(loan.mailbox, loan.borrower_state, q, k, v, 0, loan.scale)
        with cold.entered():
            kernels.serve(loan.mailbox, loan.lender_state, loan.lent, _LOOKS)
        with hot.entered():
            loan.out.fill_(torch.nan)
            kernels.collect(loan.mailbox, loan.borrower_state, loan.out, _LOOKS)
        hot.mark().wait()
        cold.mark().wait()
    assert not int(loan.borrower_state.status), f"status {int(loan.borrower_state.status)}"
    found = loan.out.clone()
    with loan.mailbox.words.device:
        mailbox_reference.post(loan.mailbox, loan.borrower_state, q, k, v, 0, loan.scale)
        mailbox_reference.serve(loan.mailbox, loan.lender_state, loan.lent)
        mailbox_reference.collect(loan.mailbox, loan.borrower_state, loan.out, 0)
    torch.testing.assert_close(found, loan.out, rtol=close, atol=close)


def idle(loan: Loan, kernels: Kernels, cold: PartitionLane) -> Figure:
    """What a poll costs a forward where nothing waits."""

    def polls() -> None:
        for _ in range(_TASKS):
            kernels.serve(loan.mailbox, loan.lender_state, loan.lent)

    with cold.entered():
        polls()
        recording = cold.record(polls)
        cold.mark().wait()
        began = time.perf_counter()
        recording.replay()
        cold.mark().wait()
    taken = (time.perf_counter() - began) / _TASKS
    return Figure(name="poll that finds no task, recorded", value=taken * 1e6, unit="µs")


def busy(loan: Loan, kernels: Kernels, hot: PartitionLane, cold: PartitionLane) -> Figure:
    """From task to task, each posted when the one before it is collected; nothing else runs."""

    def asks() -> None:
        for _ in range(_TASKS):
            kernels.post(loan.mailbox, loan.borrower_state, *loan.asked, 0, loan.scale)
            kernels.collect(loan.mailbox, loan.borrower_state, loan.out, _LOOKS)

    def serves() -> None:
        for _ in range(_TASKS + _SPARE):
            kernels.serve(loan.mailbox, loan.lender_state, loan.lent, _SERVED)

    asked, served = hot.record(asks), cold.record(serves)
    with cold.entered():
        served.replay()
    began = time.perf_counter()
    with hot.entered():
        asked.replay()
    hot.mark().wait()
    taken = (time.perf_counter() - began) / _TASKS
    cold.mark().wait()
    assert not int(loan.borrower_state.status), f"status {int(loan.borrower_state.status)}"
    rows, context = loan.mailbox.lengths.shape[0], int(loan.mailbox.lengths[0])
    return Figure(
        name=f"task of {rows} rows, context {context}, post to collect",
        value=taken * 1e6,
        unit="µs",
        note="two sides of a partition, both waiting on the device",
    )


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
