"""The lender's end of a loan: lends the blocks, finds tasks, and lets no task reach any but lent blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvloom.kernels.mailbox import End
from kvloom.offload.memory.mailbox import (
    FLOATS,
    MASK,
    START,
    LenderMailbox,
    MailboxForm,
    OffloadMailbox,
    size_of,
)
from kvloom.offload.terms import Borrow, LentBlocks
from kvloom.types.errors import BadRequest
from kvloom.types.geometry import I32, AnyArray
from kvloom.types.transfer import Transport

MOST = 64 << 20  # bytes of a mailbox beyond what is lent
SLOTS = 2  # a task is posted when the one before it is collected; one more costs nothing
_DTYPES = "float32", "bfloat16", "int8"  # of K and V, that the kernels attend over
_LONGEST = 10.0  # seconds that are believed of anything


def mailbox_form(borrow: Borrow, blocks: I32, slots: int, values: np.dtype[np.generic]) -> MailboxForm:
    """Returns the sizes of a mailbox for tasks over `blocks`, with q, k, v and outputs of type `values`.
    Raises BadRequest if `borrow` makes no sense."""
    form = borrow.form
    if borrow.heads % form.kv_heads:
        raise BadRequest(f"borrow: {borrow.heads} heads over {form.kv_heads}; want a multiple")
    pages = len(blocks) // (form.layers * form.kv_heads)
    sizes = form.layers, borrow.heads, form.kv_heads, form.head_dim
    made = MailboxForm(slots, borrow.rows, borrow.width, pages, *sizes)
    most = MOST + len(blocks) * form.block_bytes
    if size_of(made, values) > most:
        raise BadRequest(
            f"borrow: {borrow.rows} rows of {borrow.width} pages make a mailbox of {size_of(made, values):,} "
            f"bytes for {pages} pages; {most:,} at most are right"
        )
    return made


class Lending:
    """The lender's end of a loan between CPUs, with its mailbox."""

    def __init__(
        self, borrow: Borrow, blocks: I32, transport: Transport, *, slots: int = SLOTS, start: int = START
    ) -> None:
        """blocks: [pages · layers · kv_heads] of the own arena. start: of the mailbox' counters. Raises
        BadRequest if `borrow` makes no sense, QueueFull if the ledger is full, ConfigError if there is no
        memory for the mailbox."""
        form = borrow.form
        if form.dtype not in _DTYPES:
            raise BadRequest(f"borrow: K and V in {form.dtype}; {', '.join(_DTYPES)} are right")
        self.blocks = blocks
        self.mailbox = LenderMailbox(mailbox_form(borrow, blocks, slots, FLOATS), start)
        self.receiver = TaskReceiver(self.mailbox.memory, blocks, form.tokens_per_block)
        try:
            self._lent = LentBlocks(borrow, blocks, transport, self.mailbox.place)
        except BaseException:
            self.mailbox.close()
            raise
        self.loan = self._lent.loan

    def close(self) -> bool:
        """Lets the borrower begin no copy any more. Returns False while a copy is under way, for
        milliseconds."""
        if not self._lent.close():
            return False
        self.mailbox.close()
        return True


@dataclass(frozen=True, slots=True)
class TaskDescriptor:
    """The rows that the tasks of one iteration attend over, checked and out of the borrower's reach."""

    lengths: I32
    """[B] tokens, the new one counted."""
    tables: I32
    """[B, P] pages."""
    map: I32
    """[pages, layers, kv_heads] own blocks, all of them lent."""
    slot_page: I32
    slot_offset: I32
    """[B] each: the place of the new token."""


@dataclass(frozen=True, slots=True)
class Task:
    """The attention of the last token of each row of `descriptor` in one layer."""

    number: int
    slot: int
    """The slot of its q, k and v, and of its output."""
    iteration: int
    layer: int
    posted: int
    """The time of the post, in nanoseconds of the monotonic clock, as the borrower says."""
    scale: float
    window: int
    softcap: float
    descriptor: TaskDescriptor


class TaskReceiver:
    """Finds tasks and checks them; one thread at a time."""

    def __init__(self, mailbox: OffloadMailbox, lent: I32, page_tokens: int) -> None:
        """lent: [pages · layers · kv_heads] own blocks, in the order in which the borrower counts them."""
        self._memory = mailbox
        self.lent: I32 = np.array(lent, np.int32)
        self.page_tokens = page_tokens
        form = mailbox.form
        self.map: I32 = np.zeros((form.pages, form.layers, form.kv_heads), np.int32)
        self.known = np.zeros(form.pages, np.bool_)
        """`map` has the own blocks of the borrower's pages; `known` says which pages the borrower has told.
        Other code that checks descriptors writes there too."""
        self.done = mailbox.done.get()
        """The number of the last task that is done."""
        self._iteration = -1
        nothing = np.zeros(0, np.int32)
        self._descriptor = TaskDescriptor(nothing, nothing.reshape(0, 0), self.map, nothing, nothing)

    def forget(self, numbers: AnyArray) -> None:
        """Lets these blocks of the loan, as the borrower counts them, be reached no more. A task that names
        one of them nevertheless, or one that was forgotten before, gets a block that is still lent."""
        gone = self.lent[numbers]
        left = self.lent[~np.isin(self.lent, gone)][0]
        self.lent[np.isin(self.lent, gone)] = left
        self.map[np.isin(self.map, gone) & self.known[:, None, None]] = left

    @property
    def meanwhile(self) -> float:
        """The seconds that the borrower says it computes itself while it waits for a task."""
        return _seconds(float(self._memory.pace[0]))

    @property
    def period(self) -> float:
        """The seconds that the borrower says pass from one iteration to the next."""
        return _seconds(float(self._memory.pace[1]))

    @property
    def left(self) -> bool:
        """Whether the borrower has left."""
        return self._memory.left.get() != End.NONE

    def next(self) -> Task | None:
        """Returns the task to be done next, if there is one and the borrower has not left: a borrower that
        comes after it counts iterations anew. Raises BadRequest if the task breaks the rules."""
        posted = self._memory.posted.get()
        waiting = (posted - self.done) & MASK
        if not waiting or self.left:
            return None
        form = self._memory.form
        if waiting > form.slots:
            raise BadRequest(f"weave: {waiting} tasks wait in a mailbox of {form.slots}")
        slot = self.done % form.slots
        iteration, layer, rows, window, scale, softcap, since = self._memory.notes[slot].item()
        if iteration != self._iteration:
            self._descriptor = self._read(iteration)
            self._iteration = iteration
        if not 0 <= layer < form.layers or rows != len(self._descriptor.lengths):
            raise BadRequest(
                f"weave: a task of layer {layer} over {rows} rows; the model has {form.layers} layers, and "
                f"the iteration {len(self._descriptor.lengths)} rows"
            )
        number = (self.done + 1) & MASK
        rows = self._descriptor
        return Task(number, slot, iteration, layer, since, scale, max(0, window), softcap, rows)

    def answer(self, task: Task) -> None:
        """Tells the borrower that the output is there."""
        memory = self._memory
        self.done = task.number
        memory.done.swap(task.number)
        if memory.waiting.get():
            memory.done.wake()

    def end(self, why: End) -> None:
        """Takes no more tasks, and tells the borrower if it waits for one."""
        self._memory.over.swap(why)
        self._memory.done.wake()

    def _read(self, iteration: int) -> TaskDescriptor:
        """Copies the descriptor first and then checks it, because the borrower may write meanwhile."""
        memory, form = self._memory, self._memory.form
        told, rows, changed = memory.head[0].item()
        if told != iteration or not 0 < rows <= form.rows or not 0 <= changed <= form.pages:
            raise BadRequest(
                f"weave: iteration {iteration} has a descriptor of {told}, {rows} rows, {changed} pages"
            )
        self._take(memory.changed[:changed].copy())
        lengths = memory.lengths[:rows].copy()
        most = form.width * self.page_tokens
        if lengths.min() < 1 or lengths.max() > most:
            raise BadRequest(f"weave: rows of {lengths.min()} to {lengths.max()} tokens; want 1 to {most}")
        counts = -(-lengths // self.page_tokens)
        tables = memory.tables[:rows, : counts.max()].copy()
        used = np.arange(tables.shape[1]) < counts[:, None]
        tables[~used] = 0
        pages = tables[used]
        if not _inside(pages, form.pages) or not self.known[pages].all():
            raise BadRequest("weave: a row names a page that the loan has not")
        edges, offsets = np.divmod(lengths - 1, np.int32(self.page_tokens))
        return TaskDescriptor(lengths, tables, self.map, tables[np.arange(rows), edges], offsets)

    def _take(self, pages: I32) -> None:
        """Takes over rows of the borrower's map that it has changed."""
        if not _inside(pages, len(self.map)):
            raise BadRequest("weave: a page of the map that the loan has not")
        blocks = self._memory.map[pages]  # a copy
        if not _inside(blocks, len(self.lent)):
            raise BadRequest(f"weave: a block beyond the {len(self.lent)} that are lent")
        self.map[pages] = self.lent[blocks]
        self.known[pages] = True


def _seconds(told: float) -> float:
    """Returns a number that anybody may have written, bounded to what can be true."""
    return min(told, _LONGEST) if told > 0 else 0.0


def _inside(ids: AnyArray, count: int) -> bool:
    return not ids.size or bool(ids.min() >= 0 and ids.max() < count)
