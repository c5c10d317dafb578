"""Attends for another unit, over blocks of ours that it has borrowed, and splits the operators of own decode
steps so that its tasks wait less (Weaver, sections 4.1 and 4.2)."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import fmean

import numpy as np
import torch

from kvloom.kernels.cpu.attention.decode import attend_all
from kvloom.kernels.cpu.offload_serve import LookArguments
from kvloom.kernels.mailbox import End
from kvloom.kv.arena import Arena
from kvloom.offload.cpu.polling import Polling
from kvloom.offload.memory.lender import Lending
from kvloom.offload.queueing import Gap, Rule, conditional_wait, expected_stall, split
from kvloom.offload.terms import Borrow
from kvloom.types.clock import has_ended
from kvloom.types.errors import BadRequest
from kvloom.types.geometry import F64, I64, AnyArray
from kvloom.types.load import Waits

_log = logging.getLogger(__name__)
_LIVELY = 64  # forwards that poll after a task has come
_SECONDS = 5.0  # for the thread to end: it has nothing to do any more
_RECENT = 64  # forwards whose operators the expected wait is told of: as long as a few hundred tasks take
_AGAIN = 32  # steps after which the plan is made anew
_NEW = 0.1  # weight of a step in the mean of an operator's time
_FEWEST = 32  # rows of a run: fewer would have the weights read too often


class OperatorSplit:
    """Splits the operators of one model's forwards, which are the step kernel's stages."""

    def __init__(self, poll: int, rule: Callable[[], Rule | None], landed: Callable[[F64], None]) -> None:
        """poll: the address of the loan's PollArguments. rule: returns None while nothing is to be split.
        landed: called after each step with the times of all parts, in seconds."""
        self.record = LookArguments(poll=poll)
        self.address = ctypes.addressof(self.record)
        self._rule = rule
        self._landed = landed
        self._means: list[float] = []
        self._left = 1
        self._limits: Sequence[int] = ()
        self._longest = 0.0  # seconds a row, of the longest product of forwards that go layer by layer
        self._runs = 1  # of the last such forward
        self.parts: I64 = np.ones(0, np.int64)
        """[S] parts of each operator."""
        self.pieces: I64 = np.zeros(0, np.int64)
        """Nanoseconds that each part took, as the kernel says."""
        self.ends: I64 = np.zeros(0, np.int64)
        """[S] pieces that there are after each operator."""

    def runs(self, rows: int) -> int:
        """Returns the number of runs of rows into which a forward of many rows, which goes layer by layer,
        cuts its products: so many that no run would stall a task for longer than is allowed, if all products
        took as long as the longest."""
        rule = self._rule()
        bound = rule.ahead + 2 * rule.most if rule else 0.0
        wanted = -(-self._longest * rows // bound) if bound else 1
        self._runs = int(max(1, min(wanted, rows // _FEWEST)))
        return self._runs

    def ran(self, rows: int, longest: float, times: list[float]) -> None:
        """Notes such a forward; it looked for tasks after each of these times, in seconds. longest: the time
        of the longest of its products."""
        self._longest = longest * self._runs / rows
        self._landed(np.array(times))

    def begin(self, limits: Sequence[int], threads: int = 1) -> None:
        """Begins a step whose operators can have so many parts each. The thread that looks for tasks may do
        all parts of an operator alone, and then looks `threads` times as often."""
        self._limits = limits
        if len(self.parts) != len(limits):
            self.parts = np.ones(len(limits), np.int64)
            self.ends = np.zeros(len(limits), np.int64)
            self._means = []
        most = int(self.parts.sum()) * threads
        if most > len(self.pieces):
            self.pieces = np.zeros(2 * most, np.int64)
        self.record.pieces, self.record.most = self.pieces.ctypes.data, len(self.pieces)

    def end(self) -> None:
        """Ends the step. Now and then its operators are split anew."""
        pieces = np.maximum(self.pieces[: self.ends[-1]], 0) / 1e9
        took: list[float] = np.diff(np.append(0.0, pieces.cumsum())[self.ends], prepend=0.0).tolist()
        means = self._means or took
        self._means = [(1 - _NEW) * mean + _NEW * new for mean, new in zip(means, took, strict=True)]
        self._left -= 1
        if not self._left:
            self._left = _AGAIN
            rule = self._rule()
            self.parts[:] = split(self._means, *rule, self._limits) if rule else 1
        self._landed(pieces)


class AttentionServer:
    """Serves the tasks of one loan. A task is done by the thread that finds it: that of a forward of our own
    models, which polls between its operators or their parts (`polled`), or, while no forward polls, a thread
    that sleeps until there is a task."""

    def __init__(self, lending: Lending, arena: Arena, borrow: Borrow, ended: Callable[[str], None]) -> None:
        """borrow: its terms, and its process' id. ended: called once, on any thread, with the reason, when
        the borrower has left, is gone or breaks the rules; not by `close`. No lent block is touched from then
        on. Raises OSError if the process is gone."""
        self._receiver = lending.receiver
        self._mailbox = lending.mailbox.memory
        self._terms = borrow
        self._ended = ended
        self._process = os.pidfd_open(borrow.pid)
        dtype: torch.dtype = getattr(torch, borrow.form.dtype)
        self._polling = Polling(self._mailbox, arena, self._receiver, dtype, self._check)
        self._over = False  # set with the polling's lock
        self._lively = self._seen = 0
        self._counting = threading.Lock()
        self._splits: dict[str, OperatorSplit] = {}  # by own model
        self._recent: deque[F64] = deque(maxlen=_RECENT)  # seconds of each part, by forward
        self._gaps: deque[float] = deque([0.0], maxlen=_RECENT + 1)  # seconds of all, when it landed
        self._thread = threading.Thread(target=self._idle, name="weave", daemon=True)
        self._thread.start()

    @property
    def launches(self) -> bool:
        """Whether tasks wait for the host: then no forward polls (the paper's baseline, control by the
        CPU)."""
        return self._terms.control == "iterations"

    def split(self, model: str) -> OperatorSplit:
        """Returns the split of an own model's steps."""
        found = self._splits.get(model)
        if found is None:
            found = self._splits[model] = OperatorSplit(self._polling.address, self._rule, self.landed)
        return found

    def landed(self, times: F64) -> None:
        """Notes a forward that has polled after each of these times, in seconds."""
        self._recent.append(times)
        self._gaps.append(self._polling.gaps)

    def lively(self) -> bool:
        """Returns whether the forward that is to begin should poll, because a task has come lately. Otherwise
        it runs in the fastest way there is, and the thread does the tasks that come meanwhile."""
        with self._counting:
            if self._seen != self._polling.tasks:
                self._seen, self._lively = self._polling.tasks, _LIVELY
            self._lively -= self._lively > 0
            return self._lively > 0

    def poll(self) -> None:
        """Does the tasks that are there, unless another thread does."""
        threads = torch.get_num_threads()
        if threads == 1:
            self._polling.once()
        elif self._polling.taken():
            try:
                self._serve(threads)
            finally:
                self._polling.free()

    @property
    def busy(self) -> int:
        """Nanoseconds that tasks have taken."""
        return int(self._polling.record.busy)

    def enter(self) -> None:
        """Does the tasks that are there. The caller polls from here on."""
        self._polling.enter()

    def leave(self) -> None:
        """Does the tasks that are there. The caller polls no more; the server's thread does."""
        self._polling.leave()

    @contextmanager
    def polled(self) -> Iterator[None]:
        """A context in which the caller polls."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def operator(self) -> Iterator[None]:
        """A context around a forward that does not poll. It counts as one operator, before and after which
        the server looks for tasks."""
        with self.polled():
            began, busy = time.monotonic_ns(), self.busy
            yield
            self.landed(np.array([max(0, time.monotonic_ns() - began - (self.busy - busy)) / 1e9]))

    def waits(self) -> Waits:
        """Returns the seconds that the last tasks have waited, and those that they should have waited by the
        queueing model."""
        served, ahead = self._polling.served(), self._ahead()
        recent = tuple(self._recent)
        times, gap = np.concatenate(recent) if recent else np.zeros(0), self._gap()
        beyond = [wait for wait in served.waits if wait > ahead]
        return Waits(
            tasks_total=self._polling.tasks,
            ahead=ahead,
            parts=max(map(len, recent), default=0),
            service=_mean(served.services),
            wait=_mean(served.waits),
            beyond=_mean(beyond),
            stall=_mean([max(0.0, wait - ahead) for wait in served.waits]),
            expected_wait=expected_stall(times, 0.0, gap),
            expected_beyond=conditional_wait(times, ahead, gap),
            expected_stall=expected_stall(times, ahead, gap),
        )

    def _gap(self) -> Gap:
        """Returns the gap between the last forwards."""
        gaps = tuple(self._gaps)
        return Gap(gaps[-1] - gaps[0], self._polling.wake)

    def take_back(self, numbers: AnyArray) -> None:
        """Lets no task reach these blocks of the loan any more. When it returns, no task that reaches them is
        under way."""
        with self._polling.held():
            self._receiver.forget(numbers)

    def close(self) -> None:
        """Takes no more tasks; when it returns, none is under way, and the thread has ended."""
        with self._polling.held():
            self._end(End.CLOSED, None)
        self._mailbox.posted.wake()
        self._thread.join(_SECONDS)

    def _ahead(self) -> float:
        """Returns the paper's K − N, or 0 if that is negative."""
        return max(0.0, self._receiver.meanwhile - _mean(self._polling.served().services))

    def _rule(self) -> Rule | None:
        terms, step = self._terms, self._receiver.period
        return Rule.of(terms.split, terms.waits, self._ahead(), step, self._mailbox.form.layers)

    def _idle(self) -> None:
        try:
            self._watch()
        finally:
            with self._polling.held():
                self._end(End.FAILED, "this unit failed to look for tasks")
            os.close(self._process)

    def _watch(self) -> None:
        while not self._over:
            self._polling.watch()
            if self._receiver.left or has_ended(self._process):
                with self._polling.held():
                    self._end(End.CLOSED, "the borrower has left")

    def _check(self) -> int:
        """Checks a task that a kernel does not take; the kernel calls this with the lock. Mostly such a task
        is forged."""
        self._receiver.done = self._polling.record.done
        with self._guarded():
            task = None if self._over else self._receiver.next()
            if task is not None:
                self._polling.prepare(task)
                return 0
        return 1

    def _serve(self, threads: int) -> None:
        """Does with the lock what kernels do, but on all threads of a forward."""
        self._receiver.done = self._polling.record.done
        with self._guarded():
            for _ in range(2 * self._mailbox.form.slots):  # who posts without end does not keep the lock
                found = time.monotonic_ns()
                task = None if self._over else self._receiver.next()
                if task is None:
                    return
                attend_all(self._polling.arguments(task, threads), threads)
                self._receiver.answer(task)
                self._polling.record.done = task.number
                self._polling.note(task, found)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """A context around work with the lock: an error in it ends the loan."""
        try:
            yield
        except BadRequest as error:
            self._end(End.FORGED, error.message)
        except Exception:  # noqa: BLE001 -- the borrower would wait
            self._end(End.FAILED, "this unit failed to attend")
            _log.exception("weave: attention for another unit has failed; its loan ends")

    def _end(self, why: End, reason: str | None) -> None:
        if not self._over:
            self._over = True
            self._polling.close()
            self._receiver.end(why)
            if reason is not None:
                with suppress(RuntimeError):  # the loop that it would tell is closed
                    self._ended(reason)


def _mean(values: list[float]) -> float:
    return fmean(values) if values else 0.0
