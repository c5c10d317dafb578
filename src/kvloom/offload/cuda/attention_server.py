"""Attends for another unit on a device, between the operators of this unit's own forwards (Weaver, section
4.1)."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

from kvloom.kernels.mailbox import End, LenderState, LentArena, MailboxTensors
from kvloom.types.clock import has_ended

_log = logging.getLogger(__name__)
_LOOKS = 500  # of a launch while no forward runs: half a millisecond, for which one that begins waits
_SLICE = 0.05  # seconds between two looks at whether the borrower lives
_LIVELY = 64  # launches of the thread after a task, one after the other
_PAUSE = 0.002  # seconds between those after them
_COMES = 30.0  # seconds for the borrower to map the mailbox: it may be unable to


Serve = Callable[..., None]
"""Has the current stream look for a task in (MailboxTensors, LenderState, LentArena), and again as often as
said, and do it."""


class StreamPoint(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None: ...


class PolledLane(Protocol):
    """A stream of the device. Who asks it for something holds the lock."""

    lock: threading.Lock

    def entered(self) -> AbstractContextManager[object]: ...
    def mark(self) -> StreamPoint: ...


class CudaAttentionServer:
    """One loan's tasks, each done on the device by whichever launch finds it: one of a forward of our own
    models, which polls between its operators (`polled`), or, while none runs, one of a thread's.

    ended: called once, on any thread, with the reason, when the borrower has left, is gone or breaks the
    rules; not by `close`. From then on no lent block is touched."""

    def __init__(
        self,
        mailbox: MailboxTensors,
        lent: LentArena,
        start: int,
        lanes: Sequence[PolledLane],
        idle: PolledLane,
        serve: Serve,
        borrower: int,
        ended: Callable[[str], None],
        looks: int = _LOOKS,
        comes: float = _COMES,
        *,
        launches: bool = False,
    ) -> None:
        """start: what the mailbox' counters begin with. lanes: of forwards. idle: of the thread. borrower:
        its process' id. comes: seconds until it has mapped the mailbox, or the loan ends. launches:
        tasks wait until the host launches them, between two forwards (the paper's baseline, control by the
        CPU). Raises OSError if the borrower is gone."""
        self.launches = launches
        self._mailbox = mailbox
        self._lent = lent
        self._lanes = list(lanes)
        self._idle = idle
        self._serve = serve
        self._ended = ended
        self._looks = looks
        self._state = LenderState(start, mailbox)
        self._ending = threading.Lock()  # over `_over`
        self._over = False
        self._working = 0
        self._lively = _LIVELY
        self._claim = int(self._state.claim)
        self._due = time.monotonic() + comes
        self._free = threading.Condition()
        self._resting = threading.Lock()  # a launch of the thread's
        self._process = os.pidfd_open(borrower)  # the thread closes it
        self._thread = threading.Thread(target=self._watch, name="weave", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Looks for a task once, on the current stream; may be recorded."""
        self._serve(self._mailbox, self._state, self._lent)

    @contextmanager
    def polled(self) -> Iterator[None]:
        """Goes around a forward that polls."""
        with self._free:
            self._working += 1
        with self._resting:
            pass  # what the thread has launched is over
        try:
            yield
        finally:
            with self._free:
                self._working -= 1
                self._free.notify_all()

    @property
    def over(self) -> End:
        """The reason that no more tasks are taken, as the device has it."""
        return End(int(self._state.over))

    def close(self) -> None:
        """Takes no more tasks; when it returns, none is under way. Waits for what lanes have been asked
        for."""
        self._end(End.CLOSED, None)
        self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._over:
                self._rest()
                if self.over is End.FORGED:
                    self._end(End.FORGED, "the borrower has written what cannot be")
                elif int(self._mailbox.word("left")) or has_ended(self._process):
                    self._end(End.CLOSED, "the borrower has left")
                elif time.monotonic() > self._due and not int(self._mailbox.word("waiting")):
                    self._end(End.CLOSED, "the borrower has not come")
        except RuntimeError as error:  # the device has failed; its unit is about to end
            _log.error("weave: %s", " ".join(str(error).split())[:200])
        finally:
            os.close(self._process)
            self._end(End.FAILED, "this unit failed to look for tasks")

    def _rest(self) -> None:
        """Polls while no forward runs, with a pause if no task has come lately; else gives it time."""
        with self._free:
            if self._working or not self._lively:
                self._free.wait(_SLICE if self._working else _PAUSE)
        with self._resting:
            if self._working or self._over:
                return
            with self._idle.entered():
                self._serve(self._mailbox, self._state, self._lent, self._looks)
            self._idle.mark().wait()
        claim = int(self._state.claim)
        self._lively = max(0, self._lively - 1) if claim == self._claim else _LIVELY
        self._claim = claim

    def _end(self, why: End, reason: str | None) -> None:
        """Ends the loan. A device that has failed does no more tasks either."""
        with self._ending:
            if self._over:
                return
            self._over = True
            with suppress(RuntimeError):
                self._settle(why)
        if reason is not None:
            with suppress(RuntimeError):  # the loop that it would tell is closed
                self._ended(reason)

    def _settle(self, why: End) -> None:
        """Waits until the device takes and does no tasks; then tells the borrower."""
        if self.over is End.NONE:
            self._state.over.fill_(why)
        over = self.over  # the device has it
        for lane in (*self._lanes, self._idle):
            with lane.lock:
                mark = lane.mark()
            mark.wait()
        self._mailbox.word("over").fill_(over)
