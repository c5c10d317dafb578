"""The compiled end of a loan at the lender: the records by which a kernel finds tasks and does them by
itself."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from kvloom.kernels.cpu.attention.decode import AttentionArguments, span_of
from kvloom.kernels.cpu.kv_rows import KINDS
from kvloom.kernels.cpu.offload_serve import (
    AWAITED,
    DescriptorArguments,
    PollArguments,
    PollOnce,
    WatchArguments,
    enter_once,
    leave_once,
    poll_once,
    watch,
)
from kvloom.kernels.mailbox import NOTE
from kvloom.kv.arena import Arena
from kvloom.offload.memory.lender import Task, TaskDescriptor, TaskReceiver
from kvloom.offload.memory.mailbox import OffloadMailbox, SharedCounter, futex_number
from kvloom.types.geometry import I64

_KEPT = 512  # tasks of which waits and service are told
_SLICE = 0.05  # seconds of sleep until the lock is looked at again
_Host = ctypes.CFUNCTYPE(ctypes.c_int64)


@dataclass(frozen=True, slots=True)
class TaskTimes:
    """The last tasks, in seconds."""

    waits: list[float]
    """Seconds from the post of a task until it is found."""
    services: list[float]
    """Seconds from then to its end."""


class Polling:
    """The records that kernels are given, by `address`. A thread that does a task, in a kernel or here, holds
    the lock."""

    def __init__(
        self,
        mailbox: OffloadMailbox,
        arena: Arena,
        receiver: TaskReceiver,
        dtype: torch.dtype,
        check: Callable[[], int],
    ) -> None:
        """dtype: the number format of K and V in the arena. check: called with the lock if a task is not one
        that a kernel takes; it returns 0 once it has called `prepare`, and raises nothing."""
        self._mailbox = mailbox
        self._arena = arena
        self._dtype = dtype
        self._host = _Host(check)
        self._words = np.zeros(9, np.int64)  # the lock; three clocks; how long to sleep
        self._words[7:] = divmod(int(_SLICE * 1e9), 10**9)
        self._lock = SharedCounter(self._words.ctypes.data)
        self._waits: I64 = np.zeros(_KEPT, np.int64)
        self._services: I64 = np.zeros(_KEPT, np.int64)
        form = mailbox.form
        self._own = TaskDescriptor(
            np.zeros(form.rows, np.int32),
            np.zeros((form.rows, form.width), np.int32),
            receiver.map,
            np.zeros(form.rows, np.int32),
            np.zeros(form.rows, np.int32),
        )
        self._task = self._over(self._own, 0, 1)
        self._lent = receiver.lent, receiver.known
        self._descriptor = _descriptor_record(mailbox, receiver, self._own)
        self.record = self._record(receiver)
        self.address = ctypes.addressof(self.record)
        clock = self._words.ctypes.data + 8
        self._once = PollOnce(self.address, clock + 16)
        self._watch = WatchArguments(self.address, clock + 32, clock + 48, int(_SLICE * 1e9))

    def _record(self, receiver: TaskReceiver) -> PollArguments:
        mailbox, form, clocks = self._mailbox, self._mailbox.form, self._words[1:].ctypes.data
        size = form.head_dim * 4
        return PollArguments(
            lock=self._words.ctypes.data,
            posted=mailbox.posted.address,
            left=mailbox.left.address,
            finished=mailbox.done.address,
            waiting=mailbox.waiting.address,
            asleep=mailbox.asleep.address,
            notes=mailbox.notes.ctypes.data,
            note_bytes=NOTE.itemsize,
            stamp=NOTE.fields["posted"][1],  # type: ignore[index]
            slots=form.slots,
            qkv=mailbox.qkv.ctypes.data,
            qkv_slot=mailbox.qkv.strides[0],
            out=mailbox.out.ctypes.data,
            out_slot=mailbox.out.strides[0],
            k_bytes=form.heads * size,
            v_bytes=(form.heads + form.kv_heads) * size,
            layers=form.layers,
            map=receiver.map.ctypes.data,
            map_layer=form.kv_heads * 4,
            descriptor=ctypes.addressof(self._descriptor),
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
        """Does the tasks that are there on this thread alone, without the GIL, unless another thread does."""
        poll_once(self._once, 1)

    def watch(self) -> None:
        """While no forward looks for tasks, sleeps until a task comes and does it, or returns after a moment.
        One thread alone calls it."""
        watch(self._watch, 1)

    def enter(self) -> None:
        """Does the tasks that are there. The caller looks for tasks from here on, so nobody is woken for
        them."""
        clock = np.zeros(2, np.int64)
        enter_once(PollOnce(self.address, clock.ctypes.data), 1)

    def leave(self) -> None:
        """Does the tasks that are there. The caller looks for tasks no more."""
        clock = np.zeros(2, np.int64)
        leave_once(PollOnce(self.address, clock.ctypes.data), 1)

    def taken(self) -> bool:
        """Takes the lock if nobody has it. Returns whether it did; `free` is to follow then."""
        return self._lock.try_take()

    def free(self) -> None:
        if self._lock.swap(0) == AWAITED:
            self._lock.wake()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the lock."""
        if not self._lock.try_take():
            while self._lock.swap(AWAITED) != 0:
                self._lock.sleep(AWAITED, _SLICE)
        try:
            yield
        finally:
            self.free()

    def prepare(self, task: Task) -> None:
        """Gives kernels the descriptor of a task that is checked. Other tasks of its iteration need no check
        then."""
        told, own = task.descriptor, self._own
        rows, width = told.tables.shape
        own.tables[:rows, :width] = told.tables
        for theirs, kept in zip(
            (told.lengths, told.slot_page, told.slot_offset),
            (own.lengths, own.slot_page, own.slot_offset),
            strict=True,
        ):
            kept[:rows] = theirs
        self._task.batch = self.record.rows = rows
        self.record.iteration = task.iteration

    def close(self) -> None:
        """Lets kernels do no task any more. The caller has the lock."""
        self.record.closed, self.record.iteration = 1, -1

    def arguments(self, task: Task, threads: int) -> AttentionArguments:
        """Returns the attention arguments of a task, which appends and attends in one; q and k come rotated
        and normalised."""
        found = self._over(task.descriptor, task.layer, threads)
        qkv, out, record = self._mailbox.qkv[task.slot], self._mailbox.out[task.slot], self.record
        found.q, found.out = qkv.ctypes.data, out.ctypes.data
        found.k, found.v = found.q + record.k_bytes, found.q + record.v_bytes
        found.window, found.scale, found.softcap = task.window, task.scale, task.softcap
        return found

    def _over(self, told: TaskDescriptor, layer: int, threads: int) -> AttentionArguments:
        """Returns the attention arguments of any task over `told`, but for its q, k, v, output and
        scoring."""
        form, size = self._mailbox.form, self._mailbox.form.head_dim * 4
        view = self._arena.view(form.head_dim, self._dtype)
        rows, span = len(told.lengths), span_of(len(told.lengths), form.kv_heads, threads)
        return AttentionArguments(
            out_row=self._mailbox.out.strides[1],
            out_head=size,
            q_row=self._mailbox.qkv.strides[1],
            q_head=size,
            arena=view.data_ptr(),
            block_bytes=self._arena.block_bytes,
            page_tokens=view.shape[2],
            head_dim=form.head_dim,
            row_bytes=view.shape[3] * view.itemsize,
            kind=KINDS[self._dtype],
            map=told.map.ctypes.data + layer * form.kv_heads * 4,
            map_page=told.map.strides[0],
            tables=told.tables.ctypes.data,
            table_row=told.tables.strides[0],
            lengths=told.lengths.ctypes.data,
            batch=rows,
            kv_heads=form.kv_heads,
            group=form.heads // form.kv_heads,
            span=span,
            spans=-(-form.kv_heads // span),
            slot_page=told.slot_page.ctypes.data,
            slot_offset=told.slot_offset.ctypes.data,
        )

    def note(self, task: Task, found: int) -> None:
        """Counts a task that was not done by a kernel. found: nanoseconds of the monotonic clock."""
        record, at = self.record, self.record.tasks % _KEPT
        took = time.monotonic_ns() - found
        self._waits[at] = min(max(0, found - task.posted), 10**10)
        self._services[at] = took
        record.tasks += 1
        record.busy += took

    @property
    def tasks(self) -> int:
        """The number of tasks that were done so far."""
        return int(self.record.tasks)

    def served(self) -> TaskTimes:
        count = min(self.tasks, _KEPT)
        return TaskTimes((self._waits[:count] / 1e9).tolist(), (self._services[:count] / 1e9).tolist())

    @property
    def gaps(self) -> float:
        """Seconds in which no forward looked for tasks, less what tasks took of them."""
        return float(self.record.gaps) / 1e9

    @property
    def wake(self) -> float:
        """The mean seconds until a task that comes while no forward looks is found; 0 if that is not
        known."""
        return self.record.delay / self.record.met / 1e9 if self.record.met else 0.0


def _descriptor_record(
    mailbox: OffloadMailbox, receiver: TaskReceiver, own: TaskDescriptor
) -> DescriptorArguments:
    """Returns the arguments of the check. own: gets the rows of an iteration that are checked."""
    form = mailbox.form
    return DescriptorArguments(
        head=mailbox.head.ctypes.data,
        their_lengths=mailbox.lengths.ctypes.data,
        their_tables=mailbox.tables.ctypes.data,
        changed=mailbox.changed.ctypes.data,
        told=mailbox.map.ctypes.data,
        lent=receiver.lent.ctypes.data,
        blocks=len(receiver.lent),
        map=receiver.map.ctypes.data,
        known=receiver.known.ctypes.data,
        lengths=own.lengths.ctypes.data,
        tables=own.tables.ctypes.data,
        slot_page=own.slot_page.ctypes.data,
        slot_offset=own.slot_offset.ctypes.data,
        rows=form.rows,
        width=form.width,
        pages=form.pages,
        page_blocks=form.layers * form.kv_heads,
        page_tokens=receiver.page_tokens,
    )
