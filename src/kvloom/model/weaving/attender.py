"""Attends for another unit, over blocks of ours that it has borrowed."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from kvloom.core.errors import BadRequest
from kvloom.kernels.cpu_attention import AttentionArguments, attend_all, span_of
from kvloom.kv.arena import Arena
from kvloom.transport.attending import Task
from kvloom.transport.lender import Lending
from kvloom.transport.mailbox import End

_log = logging.getLogger(__name__)
_LIVELY = 64  # forwards that poll after a task has come
_SLICE = 0.05  # seconds of rest between two looks at whether the borrower lives


class Attender:
    """One loan's tasks, each done by whoever finds it: a forward of our own models, which polls between its
    operators (`polled`), or, while none does, a thread that sleeps until there is a task.

    ended: called once, on any thread, with the reason, when the borrower has left, is gone or breaks the
    rules; not by `close`. From then on no lent block is touched."""

    def __init__(self, lending: Lending, arena: Arena, borrower: int, ended: Callable[[str], None]) -> None:
        """borrower: its process' id. Raises OSError where it is gone."""
        self._receiver = lending.receiver
        self._mailbox = lending.mailbox.memory
        self._arena = arena
        self._ended = ended
        self._process = os.pidfd_open(borrower)
        self._mine = threading.Lock()  # over a task, and over `over`
        self._over = False
        self._lively = 0
        self._working = 0
        self._free = threading.Condition()
        self._thread = threading.Thread(target=self._idle, name="weave", daemon=True)
        self._thread.start()

    def lively(self) -> bool:
        """Whether the forward that is to begin had better poll: a task has come lately. Without, a forward
        takes the fastest way there is, and what comes meanwhile the thread does beside it."""
        with self._free:
            self._lively -= self._lively > 0
            return self._lively > 0

    def poll(self) -> None:
        """Do what is there, unless another thread is at it."""
        if self._mine.acquire(blocking=False):
            try:
                self._serve(torch.get_num_threads())
            finally:
                self._mine.release()

    @contextmanager
    def polled(self) -> Iterator[None]:
        """While in it, the caller polls."""
        with self._free:
            self._working += 1
        try:
            yield
        finally:
            with self._free:
                self._working -= 1
                self._free.notify_all()

    def close(self) -> None:
        """Take no more tasks; when it returns, none is under way. The thread ends a moment later."""
        with self._mine:
            self._end(End.CLOSED, None)
        with self._free:
            self._free.notify_all()
        self._mailbox.posted.wake()

    def _idle(self) -> None:
        try:
            self._watch()
        finally:
            with self._mine:
                self._end(End.FAILED, "this unit failed to look for tasks")
            os.close(self._process)

    def _watch(self) -> None:
        while not self._over:
            with self._free:
                if self._working:
                    self._free.wait(_SLICE)
                    resting = False
                else:
                    resting = True
            if resting:
                self._receiver.rest(_SLICE)
            with self._mine:
                if not self._working:
                    self._serve(1)
                if not self._over and (self._receiver.left or self._gone()):
                    self._end(End.CLOSED, "the borrower has left")

    def _gone(self) -> bool:
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(0))

    def _serve(self, threads: int) -> None:
        """Under the lock."""
        try:
            while not self._over and (task := self._receiver.next()) is not None:
                self._lively = _LIVELY
                attend_all(self._arguments(task, threads), threads)
                self._receiver.answer(task)
        except BadRequest as error:
            self._end(End.FORGED, error.message)
        except Exception:  # noqa: BLE001 -- the borrower would wait
            self._end(End.FAILED, "this unit failed to attend")
            _log.exception("weave: attention for another unit has failed; its loan ends")

    def _end(self, why: End, reason: str | None) -> None:
        if not self._over:
            self._over = True
            self._receiver.end(why)
            if reason is not None:
                with suppress(RuntimeError):  # the loop that it would tell is closed
                    self._ended(reason)

    def _arguments(self, task: Task, threads: int) -> AttentionArguments:
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
