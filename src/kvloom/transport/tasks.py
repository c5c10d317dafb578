"""The borrower's end of a mailbox: says once an iteration which rows are away, and posts a task a layer."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import numpy.typing as npt

from kvloom.core.arrays import I32, I64
from kvloom.core.errors import BadRequest, QueueFull, Unavailable
from kvloom.transport.mailbox import START, WHAT, End, Mailbox, Place, size_of
from kvloom.transport.peer import Peer
from kvloom.transport.word import MASK

_SPINS = 20_000  # looks before the thread sleeps; all but the first of them offer the core to others
_NEW = 0.05  # weight of a number in a mean
_LONG = 1.0  # seconds between two iterations, beyond which there was nothing to do
_SLICE = 0.02  # seconds of sleep between two looks at whether the lender lives
_ENDS = {
    End.CLOSED: "wants its blocks back",
    End.FORGED: "refuses what this unit wrote to it",
    End.FAILED: "failed to attend",
}

Floats = npt.NDArray[np.float32]


class Mean:
    """Of the last numbers, the newest counting most."""

    def __init__(self) -> None:
        self.value = 0.0

    def take(self, number: float) -> None:
        self.value = (1 - _NEW) * self.value + _NEW * number if self.value else number


class TaskSender:
    """For one thread at a time, and one iteration after the other. Once a method has raised Unavailable it
    is of no more use."""

    def __init__(self, peer: Peer, place: bytes, patience: float) -> None:
        """patience: seconds that the lender has for an answer. Raises BadRequest where `place` is no mailbox,
        Unavailable where the peer is gone."""
        self._peer = peer
        self._patience = patience
        self._memory = _mapped(peer, place)
        self.form = self._memory.form
        self._posted = self._memory.posted.get()
        self._iteration = START
        self._rows = 0
        self._begun = 0.0  # the iteration
        self._went = 0.0  # the last task
        self._meanwhile = Mean()
        self._period = Mean()
        self._sent: I64 = np.zeros(
            self.form.pages, np.int64
        )  # versions of the map's rows; real ones are 1 or more

    def begin(self, lengths: I32, tables: I32, page_map: I32, versions: I64) -> None:
        """What the tasks that follow are over, once all before are collected: lengths [B], the new token
        counted, tables [B, P], page_map [pages, layers, kv_heads] of blocks as the loan counts them, versions
        [pages] of its rows. Raises BadRequest where the mailbox takes fewer rows or pages."""
        memory, form = self._memory, self.form
        rows, width = tables.shape
        if not 0 < rows <= form.rows or width > form.width:
            raise BadRequest(f"weave: {rows} rows of {width} pages; want {form.rows} of {form.width} at most")
        used = np.unique(tables)
        changed = used[versions[used] != self._sent[used]]
        memory.map[changed] = page_map[changed]
        memory.changed[: len(changed)] = changed
        memory.lengths[:rows] = lengths
        memory.tables[:rows, :width] = tables
        self._sent[changed] = versions[changed]
        self._iteration = (self._iteration + 1) & MASK
        self._rows = rows
        now = time.monotonic()
        if self._begun and now - self._begun < _LONG:
            self._period.take(now - self._begun)
        self._begun = now
        memory.pace[:] = self._meanwhile.value, self._period.value
        memory.head[0] = (self._iteration, rows, len(changed))

    def post(self, layer: int, qkv: Floats, scale: float, window: int, softcap: float) -> int:
        """Ask for attention of qkv [B, heads + 2 kv_heads, D]; returns the task. Raises QueueFull where as
        many as there are slots wait, Unavailable where the lender takes none."""
        memory = self._memory
        self._refuse_over()
        if (self._posted - memory.done.get()) & MASK >= self.form.slots:
            raise QueueFull(f"weave: {self.form.slots} tasks wait at {self._unit} already", retry_after=1)
        slot = self._posted % self.form.slots
        memory.qkv[slot, : self._rows] = qkv
        now = time.monotonic_ns()
        memory.notes[slot] = (self._iteration, layer, self._rows, window, scale, softcap, now)
        self._posted = (self._posted + 1) & MASK
        memory.posted.swap(self._posted)  # a full barrier: who is not asleep now looks once more before it is
        if memory.asleep.get():
            memory.posted.wake()
        self._went = now / 1e9
        return self._posted

    def collect(self, task: int, out: Floats) -> None:
        """Wait for a task's output, into out [B, heads, D]. Raises Unavailable where the lender is gone,
        gives up, or takes longer than is waited for."""
        memory = self._memory
        now = time.monotonic()
        self._meanwhile.take(now - self._went)
        due = now + self._patience
        done = memory.done.spin((task - 1) & MASK, _SPINS)
        while not self._is_done(task, done):
            self._refuse_over()
            self._peer.refuse_gone()
            left = due - time.monotonic()
            if left <= 0:
                raise Unavailable(f"{self._unit} has not attended within {self._patience:g} s")
            memory.waiting.swap(1)
            memory.done.sleep(done, min(_SLICE, left))
            memory.waiting.set(0)
            done = memory.done.get()
        out[:] = memory.out[(task - 1) % self.form.slots, : len(out)]

    def close(self) -> None:
        """Tell the lender that no more comes."""
        self._memory.left.set(End.CLOSED)
        self._memory.posted.wake()

    @property
    def _unit(self) -> str:
        return self._peer.endpoint.unit

    def _is_done(self, task: int, done: int) -> bool:
        """Raises Unavailable where `done` is ahead of all that was posted."""
        if (self._posted - done) & MASK > self.form.slots:
            raise Unavailable(f"{self._unit} has done tasks that nobody has posted")
        return (self._posted - done) & MASK <= (self._posted - task) & MASK

    def _refuse_over(self) -> None:
        over = self._memory.over.get()
        if over:
            raise self._ended(over)

    def _ended(self, over: int) -> Unavailable:
        why = _ENDS.get(End(over), "") if over in set(End) else ""
        return Unavailable(f"{self._unit} {why or f'ended the loan with {over}'}")


def _mapped(peer: Peer, place: bytes) -> Mailbox:
    unit = peer.endpoint.unit
    try:
        where = msgspec.msgpack.decode(place, type=Place)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"mailbox: that of {unit} cannot be read: {error}") from error
    if where.memory.size != size_of(where.form):
        raise BadRequest(f"mailbox: that of {unit} contradicts itself")
    try:
        return Mailbox(peer.open(where.pid, WHAT, where.memory), where.form)
    except OSError as error:
        raise Unavailable(f"the mailbox of {unit} cannot be reached: {error.strerror}") from error
