"""The compiled end of a loan at the lender: what a kernel needs to find tasks and to do them by itself."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from kvloom.core.arrays import I64
from kvloom.kernels.cpu_attention import AttentionArguments, span_of
from kvloom.kernels.cpu_poll import AWAITED, PollArguments, PollOnce, poll_once
from kvloom.kv.arena import Arena
from kvloom.transport.attending import Task
from kvloom.transport.mailbox import NOTE, Mailbox
from kvloom.transport.word import Word, futex_number

_KEPT = 512  # tasks of which waits and service are told
_SLICE = 0.05  # seconds of sleep until the lock is looked at again
_Host = ctypes.CFUNCTYPE(ctypes.c_int64)


@dataclass(frozen=True, slots=True)
class Served:
    """The last tasks, in seconds: from being posted to their begin, and from there to their end."""

    waits: list[float]
    services: list[float]


class Polling:
    """`address` is what kernels are given. Whoever does a task, in a kernel or here, holds the lock."""

    def __init__(self, mailbox: Mailbox, arena: Arena, done: int, check: Callable[[], int]) -> None:
        """done: tasks so far. check: called with the lock where what a task is over is not known: 0 once it
        has called `prepare`. It raises nothing."""
        self._mailbox = mailbox
        self._arena = arena
        self._host = _Host(check)
        self._words = np.zeros(4, np.int64)  # the lock; two for the clock
        self._lock = Word(self._words.ctypes.data)
        self._waits: I64 = np.zeros(_KEPT, np.int64)
        self._services: I64 = np.zeros(_KEPT, np.int64)
        self._task = AttentionArguments()
        self._known: Task | None = None  # keeps what `_task` names
        form, size = mailbox.form, mailbox.form.head_dim * 4
        self.record = PollArguments(
            lock=self._words.ctypes.data,
            posted=mailbox.posted.address,
            left=mailbox.left.address,
            finished=mailbox.done.address,
            waiting=mailbox.waiting.address,
            notes=mailbox.notes.ctypes.data,
            note_bytes=NOTE.itemsize,
            stamp=NOTE.fields["posted"][1],  # type: ignore[index]
            slots=form.slots,
            layers=form.layers,
            qkv=mailbox.qkv.ctypes.data,
            qkv_slot=mailbox.qkv.strides[0],
            out=mailbox.out.ctypes.data,
            out_slot=mailbox.out.strides[0],
            k_bytes=form.heads * size,
            v_bytes=(form.heads + form.kv_heads) * size,
            map_layer=form.kv_heads * 4,
            task=ctypes.addressof(self._task),
            host=ctypes.cast(self._host, ctypes.c_void_p).value,
            clock=self._words.ctypes.data + 8,
            futex=futex_number(),
            iteration=-1,
            done=done,
            kept=_KEPT,
            waits=self._waits.ctypes.data,
            services=self._services.ctypes.data,
        )
        self.address = ctypes.addressof(self.record)
        self._once = PollOnce(self.address)

    def once(self) -> None:
        """Do what is there on this thread alone, without the GIL, unless another is at it."""
        poll_once(self._once, 1)

    def taken(self) -> bool:
        """Take the lock, if nobody has it; then `free` is to follow."""
        return self._lock.try_take()

    def free(self) -> None:
        if self._lock.swap(0) == AWAITED:
            self._lock.wake()

    @contextmanager
    def held(self) -> Iterator[None]:
        """With the lock."""
        if not self._lock.try_take():
            while self._lock.swap(AWAITED) != 0:
                self._lock.sleep(AWAITED, _SLICE)
        try:
            yield
        finally:
            self.free()

    def prepare(self, task: Task) -> None:
        """Its iteration is checked: other tasks of it need not be."""
        sheet = task.sheet
        self._known = task
        ctypes.memmove(ctypes.addressof(self._task), ctypes.addressof(self.arguments(task, 1)), _TASK_BYTES)
        self.record.map = sheet.map.ctypes.data
        self.record.rows = len(sheet.lengths)
        self.record.iteration = task.iteration

    def forget(self) -> None:
        """With the lock: whatever task comes, `check` is asked first."""
        self.record.iteration = -1

    def arguments(self, task: Task, threads: int) -> AttentionArguments:
        """Append and attend in one: q and k come turned and normalised."""
        form, sheet, size = self._mailbox.form, task.sheet, self._mailbox.form.head_dim * 4
        qkv, out = self._mailbox.qkv[task.slot], self._mailbox.out[task.slot]
        q = qkv.ctypes.data
        k = q + form.heads * size
        view = self._arena.view(form.head_dim, torch.float32)
        rows, span = len(sheet.lengths), span_of(len(sheet.lengths), form.kv_heads, threads)
        return AttentionArguments(
            0, 0, out.ctypes.data, out.strides[0], size, q, qkv.strides[0], size,
            view.data_ptr(), self._arena.block_bytes, view.shape[2], form.head_dim,
            sheet.map.ctypes.data + task.layer * form.kv_heads * 4, sheet.map.strides[0],
            sheet.tables.ctypes.data, sheet.tables.strides[0], sheet.lengths.ctypes.data,
            rows, form.kv_heads, form.heads // form.kv_heads, task.window, span, -(-form.kv_heads // span),
            task.scale, task.softcap,
            k, k + form.kv_heads * size, sheet.slot_page.ctypes.data, sheet.slot_offset.ctypes.data,
        )  # fmt: skip

    def note(self, task: Task, begun: int) -> None:
        """A task that was not done by a kernel has ended. begun: nanoseconds of the monotonic clock."""
        record, at = self.record, self.record.tasks % _KEPT
        took = time.monotonic_ns() - begun
        self._waits[at] = min(max(0, begun - task.posted), 10**10)
        self._services[at] = took
        record.tasks += 1
        record.busy += took

    @property
    def tasks(self) -> int:
        """Done, ever."""
        return int(self.record.tasks)

    def served(self) -> Served:
        count = min(self.tasks, _KEPT)
        return Served((self._waits[:count] / 1e9).tolist(), (self._services[:count] / 1e9).tolist())


_TASK_BYTES = ctypes.sizeof(AttentionArguments)
