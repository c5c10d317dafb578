"""A mailbox between the two sides of a partition: that tasks are done, how long one takes, and what a poll
costs that finds none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tools.gpu_checks.report import Figure

from kvloom.exec.cuda.device import Device, Lane
from kvloom.kernels import mail_programs as mail_reference
from kvloom.kernels.mail import Desk, Lent, Mail, Pad
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
    """The three that work a mailbox, as their twins in `kernels/mail_reference.py` say."""

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
        self.mail: Mail = LenderDeviceMailbox(form, dtype, device).mail
        kind = getattr(torch, dtype)
        self.desk, self.pad = Desk(START, self.mail), Pad(START, device)
        count = form.pages * form.kv_heads
        memory = torch.randn(count * _BLOCK // kind.itemsize, device=device).to(kind).view(torch.uint8)
        self.lent = Lent(
            torch.arange(count, dtype=torch.int32, device=device),
            block_view(memory, _BLOCK, form.head_dim, kind),
        )
        self.mail.lengths.fill_(context)
        self.mail.map.view(-1).copy_(self.lent.blocks)
        pages = torch.arange(form.rows * form.width, dtype=torch.int32, device=device)
        self.mail.tables.copy_(pages.view(form.rows, form.width))
        self.mail.head[0, :2] = torch.tensor([1, form.rows], dtype=torch.int32)
        self.pad.step.copy_(torch.tensor([1, form.rows, 0], dtype=torch.int32))
        heads = form.heads, form.kv_heads, form.kv_heads
        self.asked = [torch.randn(form.rows, n, form.head_dim, device=device).to(kind) for n in heads]
        self.out = torch.empty_like(self.asked[0])
        self.scale = form.head_dim**-0.5


def between_sides(device: Device) -> list[Figure]:
    """Raises AssertionError where a task is not done, or not rightly."""
    form = MailboxForm(2, 16, 32, 512, 1, 32, 8, 128)
    loan = Loan(form, "bfloat16", device.torch, 1000)
    hot, cold = (device.partitions.pairs or [(device.partitions.whole,) * 2])[0]
    kernels = Kernels.triton()
    right(loan, kernels, hot, cold, close=2e-2)
    return [idle(loan, kernels, cold), busy(loan, kernels, hot, cold)]


def right(loan: Loan, kernels: Kernels, hot: Lane, cold: Lane, close: float) -> None:
    """Tasks one by one, both ends waiting on the device."""
    q, k, v = loan.asked
    for _ in range(3):
        with hot.entered():
            kernels.post(loan.mail, loan.pad, q, k, v, 0, loan.scale)
        with cold.entered():
            kernels.serve(loan.mail, loan.desk, loan.lent, _LOOKS)
        with hot.entered():
            loan.out.fill_(torch.nan)
            kernels.collect(loan.mail, loan.pad, loan.out, _LOOKS)
        hot.mark().wait()
        cold.mark().wait()
    assert not int(loan.pad.status), f"status {int(loan.pad.status)}"
    found = loan.out.clone()
    with loan.mail.words.device:
        mail_reference.post(loan.mail, loan.pad, q, k, v, 0, loan.scale)
        mail_reference.serve(loan.mail, loan.desk, loan.lent)
        mail_reference.collect(loan.mail, loan.pad, loan.out, 0)
    torch.testing.assert_close(found, loan.out, rtol=close, atol=close)


def idle(loan: Loan, kernels: Kernels, cold: Lane) -> Figure:
    """What a poll costs a forward where nothing waits."""

    def polls() -> None:
        for _ in range(_TASKS):
            kernels.serve(loan.mail, loan.desk, loan.lent)

    with cold.entered():
        polls()
        recording = cold.record(polls)
        cold.mark().wait()
        began = time.perf_counter()
        recording.replay()
        cold.mark().wait()
    taken = (time.perf_counter() - began) / _TASKS
    return Figure(name="poll that finds no task, recorded", value=taken * 1e6, unit="µs")


def busy(loan: Loan, kernels: Kernels, hot: Lane, cold: Lane) -> Figure:
    """From task to task, each posted when the one before it is collected; nothing else runs."""

    def asks() -> None:
        for _ in range(_TASKS):
            kernels.post(loan.mail, loan.pad, *loan.asked, 0, loan.scale)
            kernels.collect(loan.mail, loan.pad, loan.out, _LOOKS)

    def serves() -> None:
        for _ in range(_TASKS + _SPARE):
            kernels.serve(loan.mail, loan.desk, loan.lent, _SERVED)

    asked, served = hot.record(asks), cold.record(serves)
    with cold.entered():
        served.replay()
    began = time.perf_counter()
    with hot.entered():
        asked.replay()
    hot.mark().wait()
    taken = (time.perf_counter() - began) / _TASKS
    cold.mark().wait()
    assert not int(loan.pad.status), f"status {int(loan.pad.status)}"
    rows, context = loan.mail.lengths.shape[0], int(loan.mail.lengths[0])
    return Figure(
        name=f"task of {rows} rows, context {context}, post to collect",
        value=taken * 1e6,
        unit="µs",
        note="two sides of a partition, both waiting on the device",
    )
