"""The compiled end of a loan at the lender: what a kernel needs to find tasks and to do them by itself."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from kvloom.kernels.cpu.attention import AttentionArguments, span_of
from kvloom.kernels.cpu.offload_serve import (
    AWAITED,
    PollArguments,
    PollOnce,
    WatchArguments,
    enter_once,
    leave_once,
    poll_once,
    watch,
)
from kvloom.kv.arena import Arena
from kvloom.model.weaving.records import mailbox_places, sheet_record
from kvloom.transport.attending import Sheet, Task, TaskReceiver
from kvloom.transport.mailbox import Mailbox
from kvloom.transport.word import Word, futex_number
from kvloom.types.geometry import I64

_KEPT = 512  # tasks of which waits and service are told
_SLICE = 0.05  # seconds of sleep until the lock is looked at again
_Host = ctypes.CFUNCTYPE(ctypes.c_int64)


@dataclass(frozen=True, slots=True)
class Served:
    """The last tasks, in seconds: from being posted to being found, and from there to their end."""

    waits: list[float]
    services: list[float]


class Polling:
    """`address` is what kernels are given. Whoever does a task, in a kernel or here, holds the lock."""

    def __init__(
        self, mailbox: Mailbox, arena: Arena, receiver: TaskReceiver, check: Callable[[], int]
    ) -> None:
        """check: called with the lock where a task is not one that a kernel takes: 0 once it has called
        `prepare`. It raises nothing."""
        self._mailbox = mailbox
        self._arena = arena
        self._host = _Host(check)
        self._words = np.zeros(9, np.int64)  # the lock; three clocks; how long to sleep
        self._words[7:] = divmod(int(_SLICE * 1e9), 10**9)
        self._lock = Word(self._words.ctypes.data)
        self._waits: I64 = np.zeros(_KEPT, np.int64)
        self._services: I64 = np.zeros(_KEPT, np.int64)
        form = mailbox.form
        self._own = Sheet(
            np.zeros(form.rows, np.int32),
            np.zeros((form.rows, form.width), np.int32),
            receiver.map,
            np.zeros(form.rows, np.int32),
            np.zeros(form.rows, np.int32),
        )
        self._task = self._over(self._own, 0, 1)
        self._lent = receiver.lent, receiver.known
        self._sheet = sheet_record(mailbox, receiver, self._own)
        self.record = self._record(receiver)
        self.address = ctypes.addressof(self.record)
        clock = self._words.ctypes.data + 8
        self._once = PollOnce(self.address, clock + 16)
        self._watch = WatchArguments(self.address, clock + 32, clock + 48, int(_SLICE * 1e9))

    def _record(self, receiver: TaskReceiver) -> PollArguments:
        mailbox, form, clocks = self._mailbox, self._mailbox.form, self._words[1:].ctypes.data
        return PollArguments(
            lock=self._words.ctypes.data,
            **mailbox_places(mailbox),
            layers=form.layers,
            map=receiver.map.ctypes.data,
            map_layer=form.kv_heads * 4,
            sheet=ctypes.addressof(self._sheet),
            task=ctypes.addressof(self._task),
            host=ctypes.cast(self._host, ctypes.c_void_p).value,
            clock=clocks,
            futex=futex_number(),
            iteration=-1,
            done=receiver.done,
            kept=_KEPT,
            waits=self._waits.ctypes.data,
            services=self._services.ctypes.data,
        )

    def once(self) -> None:
        """Do what is there on this thread alone, without the GIL, unless another is at it."""
        poll_once(self._once, 1)

    def watch(self) -> None:
        """While no forward looks for tasks, sleep until one comes, and do it; for a moment. Of one thread."""
        watch(self._watch, 1)

    def enter(self) -> None:
        """The caller looks for tasks from here on, so nobody is woken for them; it does what is there."""
        clock = np.zeros(2, np.int64)
        enter_once(PollOnce(self.address, clock.ctypes.data), 1)

    def leave(self) -> None:
        """It does what is there, and does not look any more."""
        clock = np.zeros(2, np.int64)
        leave_once(PollOnce(self.address, clock.ctypes.data), 1)

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
        sheet, own = task.sheet, self._own
        rows, width = sheet.tables.shape
        own.tables[:rows, :width] = sheet.tables
        for told, kept in zip(
            (sheet.lengths, sheet.slot_page, sheet.slot_offset),
            (own.lengths, own.slot_page, own.slot_offset),
            strict=True,
        ):
            kept[:rows] = told
        self._task.batch = self.record.rows = rows
        self.record.iteration = task.iteration

    def close(self) -> None:
        """With the lock: kernels do no task any more."""
        self.record.closed, self.record.iteration = 1, -1

    def arguments(self, task: Task, threads: int) -> AttentionArguments:
        """Append and attend in one: q and k come turned and normalised."""
        found = self._over(task.sheet, task.layer, threads)
        qkv, out, record = self._mailbox.qkv[task.slot], self._mailbox.out[task.slot], self.record
        found.q, found.out = qkv.ctypes.data, out.ctypes.data
        found.k, found.v = found.q + record.k_bytes, found.q + record.v_bytes
        found.window, found.scale, found.softcap = task.window, task.scale, task.softcap
        return found

    def _over(self, sheet: Sheet, layer: int, threads: int) -> AttentionArguments:
        """Of any task over the sheet; its q, k, v and output, and how they are scored, are to be added."""
        form, size = self._mailbox.form, self._mailbox.form.head_dim * 4
        view = self._arena.view(form.head_dim, torch.float32)
        rows, span = len(sheet.lengths), span_of(len(sheet.lengths), form.kv_heads, threads)
        return AttentionArguments(
            out_row=self._mailbox.out.strides[1],
            out_head=size,
            q_row=self._mailbox.qkv.strides[1],
            q_head=size,
            arena=view.data_ptr(),
            block_bytes=self._arena.block_bytes,
            page_tokens=view.shape[2],
            head_dim=form.head_dim,
            map=sheet.map.ctypes.data + layer * form.kv_heads * 4,
            map_page=sheet.map.strides[0],
            tables=sheet.tables.ctypes.data,
            table_row=sheet.tables.strides[0],
            lengths=sheet.lengths.ctypes.data,
            batch=rows,
            kv_heads=form.kv_heads,
            group=form.heads // form.kv_heads,
            span=span,
            spans=-(-form.kv_heads // span),
            slot_page=sheet.slot_page.ctypes.data,
            slot_offset=sheet.slot_offset.ctypes.data,
        )

    def note(self, task: Task, found: int) -> None:
        """A task that was not done by a kernel has ended. found: nanoseconds of the monotonic clock."""
        record, at = self.record, self.record.tasks % _KEPT
        took = time.monotonic_ns() - found
        self._waits[at] = min(max(0, found - task.posted), 10**10)
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

    @property
    def gaps(self) -> float:
        """Seconds in which no forward looked for tasks, ever, less what tasks took of them."""
        return float(self.record.gaps) / 1e9

    @property
    def wake(self) -> float:
        """Seconds until a task that comes then is found, on average; 0 where nobody knows."""
        return self.record.delay / self.record.met / 1e9 if self.record.met else 0.0
