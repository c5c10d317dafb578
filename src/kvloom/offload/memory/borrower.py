"""The borrower's end of a loan: copies into and out of the lent blocks, says once an iteration which rows are
offloaded, and posts a task a layer."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvloom.kernels.cpu.block_copy import copy_blocks
from kvloom.kernels.cpu.decode_step import NOWHERE, AskArguments
from kvloom.kernels.mailbox import NOTE, End
from kvloom.offload.memory.mailbox import (
    MASK,
    START,
    WHAT,
    MailboxForm,
    MailboxPlace,
    OffloadMailbox,
    changed_pages,
    end_of,
    futex_number,
    size_of,
)
from kvloom.offload.terms import Borrow, Loan
from kvloom.transfer.fenced import PeerProcess
from kvloom.transfer.shared_memory import PIECE, ShmPeer
from kvloom.transfer.target import Blocks, WriteTarget
from kvloom.types.address import KVAddress
from kvloom.types.errors import BadRequest, QueueFull, Unavailable
from kvloom.types.geometry import I32, I64
from kvloom.types.job import PageMove
from kvloom.types.transfer import BlockCopies

_SPINS = 20_000  # looks before the thread sleeps; all but the first of them offer the core to others
_NEW = 0.05  # weight of a number in a mean
_LONG = 1.0  # seconds between two iterations, beyond which there was nothing to do
_SLICE = 0.02  # seconds of sleep between two looks at whether the lender lives

Bytes = TypeVar("Bytes")  # an array of an arena's bytes, as its device has them
Floats = npt.NDArray[np.float32]


class Mean:
    """A moving mean of numbers, of which the newest count most."""

    def __init__(self) -> None:
        self.value = 0.0

    def take(self, number: float) -> None:
        self.value = (1 - _NEW) * self.value + _NEW * number if self.value else number


class TaskSender:
    """Posts tasks and collects their outputs; one thread at a time, one iteration after the other. Once a
    method has raised Unavailable the sender is of no more use."""

    def __init__(self, peer: ShmPeer, place: bytes, patience: float) -> None:
        """patience: seconds that the lender has for an answer. Raises BadRequest if `place` is no mailbox,
        Unavailable if the peer is gone."""
        self._peer = peer
        self._patience = patience
        self._memory = _mapped(peer, place)
        self.form = self._memory.form
        self.spent: I64 = np.zeros(self.form.layers + 2, np.int64)
        """Nanoseconds that the kernel has worked on each layer itself; two words more are for the clock."""
        self.record = _record(self._memory, self.spent)
        """The record by which a kernel posts and collects the tasks of an iteration that has begun; `settle`
        follows. `collect` goes on with tasks that the kernel leaves undone."""
        self._iteration = START
        self._rows = 0
        self._begun = 0.0  # the iteration
        self._meanwhile = Mean()
        self._period = Mean()
        self._sent: I64 = np.zeros(self.form.pages, np.int64)  # versions of the map's rows; real ones > 0

    def begin(self, lengths: I32, tables: I32, page_map: I32, versions: I64) -> None:
        """Writes the descriptor of the tasks that follow, once all before are collected: lengths [B], the new
        token counted, tables [B, P], page_map [pages, layers, kv_heads] of blocks as the loan counts them,
        versions [pages] of its rows. Raises BadRequest if the mailbox takes fewer rows or pages."""
        memory, (rows, width) = self._memory, tables.shape
        changed = changed_pages(self.form, tables, versions, self._sent)
        memory.map[changed] = page_map[changed]
        memory.changed[: len(changed)] = changed
        memory.lengths[:rows] = lengths
        memory.tables[:rows, :width] = tables
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
        """Asks for attention of qkv [B, heads + 2 kv_heads, D] and returns the task. Raises QueueFull if
        tasks wait in all slots, Unavailable if the lender takes none."""
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
        """Waits for a task's output, into out [B, heads, D]. Raises Unavailable if the lender is gone, gives
        up, or takes too long."""
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
        """Notes that a kernel has posted and collected the tasks of so many layers."""
        for spent in self.spent[:layers].tolist():
            if spent:
                self._meanwhile.take(spent / 1e9)

    def close(self) -> None:
        """Tells the lender that no more tasks come."""
        self._memory.left.set(End.CLOSED)
        self._memory.posted.wake()

    @property
    def _unit(self) -> str:
        return self._peer.endpoint.unit

    def _is_done(self, task: int, done: int) -> bool:
        """Raises Unavailable if `done` is ahead of all that was posted."""
        posted = self.record.count
        if (posted - done) & MASK > self.form.slots:
            raise Unavailable(f"{self._unit} has done tasks that nobody has posted")
        return bool((posted - done) & MASK <= (posted - task) & MASK)

    def _refuse_over(self) -> None:
        over = self._memory.over.get()
        if over:
            raise Unavailable(end_of(self._unit, over))


def _record(mailbox: OffloadMailbox, spent: I64) -> AskArguments:
    """Returns the record of a mailbox for the kernels. spent [layers + 2]: the times that the kernel
    writes."""
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


def _mapped(peer: ShmPeer, place: bytes) -> OffloadMailbox:
    unit = peer.endpoint.unit
    try:
        where = msgspec.msgpack.decode(place, type=MailboxPlace)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"mailbox: that of {unit} cannot be read: {error}") from error
    if where.memory.size != size_of(where.form):
        raise BadRequest(f"mailbox: that of {unit} contradicts itself")
    try:
        return OffloadMailbox(peer.open(where.pid, WHAT, where.memory), where.form)
    except OSError as error:
        raise Unavailable(f"the mailbox of {unit} cannot be reached: {error.strerror}") from error


class LentMemory(ABC, Generic[Bytes]):
    """The lent blocks of a lender's arena, mapped and counted from 0. They are copied to and from as long as
    they are lent."""

    piece = PIECE
    """Bytes copied between two looks at the ledger."""

    def __init__(self, borrow: Borrow, loan: Loan, peer: PeerProcess, arena: Blocks, memory: Bytes) -> None:
        """arena, memory: the peer's. Raises BadRequest if the loan is not what was asked for."""
        form = borrow.form
        address = KVAddress(
            model=borrow.model,
            form=form,
            begin=0,
            end=loan.pages * form.tokens_per_block,
            blocks=loan.blocks,
            ticket=loan.ticket,
        )
        self.room = WriteTarget.of(address, 0, address.end, own=arena, peer=arena)
        self._peer = peer
        self._memory = memory
        self._ticket = loan.ticket
        self._blocks = address.block_map.ravel()
        self._copying = threading.Lock()  # a ledger's locks do not keep one process' threads apart

    @property
    def blocks(self) -> int:
        return len(self._blocks)

    def move(self, arena: Bytes, home: I32, away: I32, move: PageMove) -> None:
        """Copies pages between `arena`, all bytes of this unit's, and the loan. home, away: [pages, layers,
        kv_heads]. Raises BadRequest if the loan is over, Unavailable if the lender is gone."""
        own, lent = home[move.home], away[move.lent]
        counts = np.repeat(move.tokens, own[0].size)
        copy = self.put if move.out else self.take
        copy(arena, own.ravel(), lent.ravel(), counts)

    def put(self, source: Bytes, own: I32, away: I32, counts: I32) -> None:
        """Copies the first counts[i] tokens of block own[i] of `source` into block away[i] of the loan.
        Raises as `move`."""
        self._copy(source, self._memory, own, self._blocks[away], counts)

    def take(self, target: Bytes, own: I32, away: I32, counts: I32) -> None:
        """Copies in the other direction."""
        self._copy(self._memory, target, self._blocks[away], own, counts)

    def _copy(self, source: Bytes, target: Bytes, from_: I32, to: I32, counts: I32) -> None:
        rows = max(1, self.piece // self.room.block_bytes)
        for first in range(0, len(to), rows):
            part = slice(first, first + rows)
            lists = (from_[part], to[part], np.zeros(len(to[part]), np.int32), counts[part])
            own, theirs, offsets, sizes = map(np.ascontiguousarray, lists)
            self._peer.refuse_gone()
            with self._copying, self._peer.ledger.writing(self._ticket):
                self._write(source, target, BlockCopies(own, theirs, offsets, sizes))

    @abstractmethod
    def _write(self, source: Bytes, target: Bytes, copies: BlockCopies) -> None:
        """Copies blocks copies.own of `source` to blocks copies.peer of `target` before it returns."""


class BorrowedBlocks(LentMemory[npt.NDArray[np.uint8]]):
    """The borrower's end of a loan between CPUs."""

    def __init__(self, borrow: Borrow, loan: Loan, patience: float) -> None:
        """patience: seconds that the lender has for an answer. Raises BadRequest if the loan is not what was
        asked for, Unavailable if the lender is gone."""
        peer = ShmPeer(loan.peer)
        self.tasks = TaskSender(peer, loan.mailbox, patience)
        try:
            super().__init__(borrow, loan, peer, peer, peer.memory)
            refuse_other(self.tasks.form, borrow, loan.pages, loan.peer.unit)
        except BaseException:
            self.tasks.close()  # else it would be lent for nothing
            raise

    def _write(
        self, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], copies: BlockCopies
    ) -> None:
        copy_blocks(
            source,
            target,
            copies.own,
            copies.peer,
            copies.offsets,
            copies.counts,
            block_bytes=self.room.block_bytes,
            page_tokens=self.room.page_tokens,
            token_bytes=self.room.token_bytes,
        )


def refuse_other(made: MailboxForm, borrow: Borrow, pages: int, unit: str) -> None:
    """Raises BadRequest if the mailbox of the lender `unit` has other sizes than were asked for."""
    form = borrow.form
    sizes = form.layers, borrow.heads, form.kv_heads, form.head_dim
    if made != MailboxForm(made.slots, borrow.rows, borrow.width, pages, *sizes):
        raise BadRequest(f"loan: the mailbox of {unit} is for another model")
