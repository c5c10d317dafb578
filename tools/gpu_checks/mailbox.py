"""A mailbox between the two sides of a partition: that tasks are done, how long one takes, and what a poll
costs that finds none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tools.gpu_checks.report import Figure

from kvloom.exec.cuda.device import GpuDevice, PartitionLane
from kvloom.kernels import mailbox_reference
from kvloom.kernels.mailbox import BorrowerState, LenderState, LentArena, MailboxTensors
from kvloom.kernels.reference import block_view
from kvloom.offload.memory.device import LenderDeviceMailbox
from kvloom.offload.memory.mailbox import START, MailboxForm

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
