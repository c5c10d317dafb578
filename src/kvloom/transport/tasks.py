"""The borrower's end of a mailbox: says once an iteration which rows are away, and posts a task a layer."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import numpy.typing as npt

from kvloom.kernels.cpu.decode_step import NOWHERE, AskArguments
from kvloom.transfer.shared_memory import ShmPeer
from kvloom.transport.mailbox import NOTE, START, WHAT, End, Mailbox, Place, end_of, size_of
from kvloom.transport.word import MASK, futex_number
from kvloom.types.errors import BadRequest, QueueFull, Unavailable
from kvloom.types.geometry import I32, I64

_SPINS = 20_000  # looks before the thread sleeps; all but the first of them offer the core to others
_NEW = 0.05  # weight of a number in a mean
_LONG = 1.0  # seconds between two iterations, beyond which there was nothing to do
_SLICE = 0.02  # seconds of sleep between two looks at whether the lender lives

Floats = npt.NDArray[np.float32]


class Mean:
    """Of the last numbers, the newest counting most."""

    def __init__(self) -> None:
        self.value = 0.0

    def take(self, number: float) -> None:
        self.value = (1 - _NEW) * self.value + _NEW * number if self.value else number


class TaskSender:
    """For one thread at a time, and one iteration after the other. Once a method has raised Unavailable it
    is of no more use.

    record: with it a kernel posts and collects the tasks of an iteration that has begun by itself; `settle`
    follows. What it leaves undone `collect` goes on with."""

    def __init__(self, peer: ShmPeer, place: bytes, patience: float) -> None:
        """patience: seconds that the lender has for an answer. Raises BadRequest where `place` is no mailbox,
        Unavailable where the peer is gone."""
        self._peer = peer
        self._patience = patience
        self._memory = _mapped(peer, place)
        self.form = self._memory.form
        self.spent: I64 = np.zeros(self.form.layers + 2, np.int64)  # by layer; two for the clock
        self.record = _record(self._memory, self.spent)
        self._iteration = START
        self._rows = 0
        self._begun = 0.0  # the iteration
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
        self.record.iteration = self._iteration
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
        if (self.record.count - memory.done.get()) & MASK >= self.form.slots:
            raise QueueFull(f"weave: {self.form.slots} tasks wait at {self._unit} already", retry_after=1)
        slot = self.record.count % self.form.slots
        memory.qkv[slot, : self._rows] = qkv
        now = time.monotonic_ns()
        memory.notes[slot] = (self._iteration, layer, self._rows, window, scale, softcap, now)
        number = (int(self.record.count) + 1) & MASK
        self.record.count = number
        memory.posted.swap(number)  # a full barrier: who is not asleep now looks once more before it is
        if memory.asleep.get():
            memory.posted.wake()
        self.record.went = now
        return number

    def collect(self, task: int, out: Floats) -> None:
        """Wait for a task's output, into out [B, heads, D]. Raises Unavailable where the lender is gone,
        gives up, or takes longer than is waited for."""
        memory = self._memory
        due, looks = time.monotonic() + self._patience, 0
        if self.record.paused == NOWHERE:  # else the kernel has looked, and noted the time
            looks = self.record.spins
            self._meanwhile.take((time.monotonic_ns() - self.record.went) / 1e9)
        done = memory.done.spin((task - 1) & MASK, looks)
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

    def settle(self, layers: int) -> None:
        """A kernel has posted and collected the tasks of so many layers."""
        for spent in self.spent[:layers].tolist():
            if spent:
                self._meanwhile.take(spent / 1e9)

    def close(self) -> None:
        """Tell the lender that no more comes."""
        self._memory.left.set(End.CLOSED)
        self._memory.posted.wake()

    @property
    def _unit(self) -> str:
        return self._peer.endpoint.unit

    def _is_done(self, task: int, done: int) -> bool:
        """Raises Unavailable where `done` is ahead of all that was posted."""
        posted = self.record.count
        if (posted - done) & MASK > self.form.slots:
            raise Unavailable(f"{self._unit} has done tasks that nobody has posted")
        return bool((posted - done) & MASK <= (posted - task) & MASK)

    def _refuse_over(self) -> None:
        over = self._memory.over.get()
        if over:
            raise Unavailable(end_of(self._unit, over))


def _record(mailbox: Mailbox, spent: I64) -> AskArguments:
    """spent [layers + 2]: where the kernel writes times."""
    form = mailbox.form
    return AskArguments(
        posted=mailbox.posted.address,
        finished=mailbox.done.address,
        asleep=mailbox.asleep.address,
        over=mailbox.over.address,
        notes=mailbox.notes.ctypes.data,
        note_bytes=NOTE.itemsize,
        slots=form.slots,
        qkv=mailbox.qkv.ctypes.data,
        qkv_slot=mailbox.qkv.strides[0],
        qkv_row=mailbox.qkv.strides[1],
        out=mailbox.out.ctypes.data,
        out_slot=mailbox.out.strides[0],
        out_row=mailbox.out.strides[1],
        meanwhile=spent.ctypes.data,
        clock=spent[form.layers :].ctypes.data,
        futex=futex_number(),
        spins=_SPINS,
        count=mailbox.posted.get(),
        paused=NOWHERE,
        resume=NOWHERE,
    )


def _mapped(peer: ShmPeer, place: bytes) -> Mailbox:
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
