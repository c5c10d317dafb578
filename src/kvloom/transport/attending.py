"""The lender's end of a mailbox: finds tasks, and lets none of them name anything but lent blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvloom.transport.mailbox import End, Mailbox
from kvloom.transport.word import MASK
from kvloom.types.errors import BadRequest
from kvloom.types.geometry import I32, AnyArray

_LONGEST = 10.0  # seconds that are believed of anything


@dataclass(frozen=True, slots=True)
class Sheet:
    """What tasks of one iteration are over, checked and out of the borrower's reach: lengths [B], tables [B,
    P] of pages, map [pages, layers, kv_heads] of own blocks, all of them lent. slot_page, slot_offset
    [B]: where the new token goes."""

    lengths: I32
    tables: I32
    map: I32
    slot_page: I32
    slot_offset: I32


@dataclass(frozen=True, slots=True)
class Task:
    """Attention of the last token of each row of `sheet` in one layer. slot: where its q, k and v are, and
    its output goes. posted: when, in nanoseconds of the monotonic clock, as the borrower says."""

    number: int
    slot: int
    iteration: int
    layer: int
    posted: int
    scale: float
    window: int
    softcap: float
    sheet: Sheet


class TaskReceiver:
    """For one thread at a time. done: the number of the last task that is. map, known: own blocks of the
    borrower's pages, and which it has told; whoever else checks sheets writes there too."""

    def __init__(self, mailbox: Mailbox, lent: I32, page_tokens: int) -> None:
        """lent: [pages · layers · kv_heads] own blocks, in the order in which the borrower counts them."""
        self._memory = mailbox
        self.lent: I32 = np.ascontiguousarray(lent)
        self.page_tokens = page_tokens
        form = mailbox.form
        self.map: I32 = np.zeros((form.pages, form.layers, form.kv_heads), np.int32)
        self.known = np.zeros(form.pages, np.bool_)
        self.done = mailbox.done.get()
        self._iteration = -1
        nothing = np.zeros(0, np.int32)
        self._sheet = Sheet(nothing, nothing.reshape(0, 0), self.map, nothing, nothing)

    @property
    def meanwhile(self) -> float:
        """Seconds, as the borrower says, that it has to do itself while it waits for a task."""
        return _seconds(float(self._memory.pace[0]))

    @property
    def period(self) -> float:
        """Seconds, as it says, from one iteration to the next."""
        return _seconds(float(self._memory.pace[1]))

    @property
    def left(self) -> bool:
        """The borrower wants no more."""
        return self._memory.left.get() != End.NONE

    def next(self) -> Task | None:
        """The task to be done next, if there is one, and the borrower has not left: one that comes after that
        counts iterations anew. Raises BadRequest where it cannot be one of a borrower that keeps to the
        rules."""
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
            self._sheet = self._read(iteration)
            self._iteration = iteration
        if not 0 <= layer < form.layers or rows != len(self._sheet.lengths):
            raise BadRequest(
                f"weave: a task of layer {layer} over {rows} rows; the model has {form.layers} layers, and "
                f"the iteration {len(self._sheet.lengths)} rows"
            )
        number = (self.done + 1) & MASK
        sheet = self._sheet
        return Task(number, slot, iteration, layer, since, scale, max(0, window), softcap, sheet)

    def answer(self, task: Task) -> None:
        """Its output is there."""
        memory = self._memory
        self.done = task.number
        memory.done.swap(task.number)
        if memory.waiting.get():
            memory.done.wake()

    def end(self, why: End) -> None:
        """Take no more tasks: whoever waits for one is told."""
        self._memory.over.swap(why)
        self._memory.done.wake()

    def _read(self, iteration: int) -> Sheet:
        """Copied first, and then checked: the borrower may write meanwhile."""
        memory, form = self._memory, self._memory.form
        told, rows, changed = memory.head[0].item()
        if told != iteration or not 0 < rows <= form.rows or not 0 <= changed <= form.pages:
            raise BadRequest(
                f"weave: iteration {iteration} has a sheet of {told}, {rows} rows, {changed} pages"
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
        return Sheet(lengths, tables, self.map, tables[np.arange(rows), edges], offsets)

    def _take(self, pages: I32) -> None:
        """Rows of the borrower's map that it has changed."""
        if not _inside(pages, len(self.map)):
            raise BadRequest("weave: a page of the map that the loan has not")
        blocks = self._memory.map[pages]  # a copy
        if not _inside(blocks, len(self.lent)):
            raise BadRequest(f"weave: a block beyond the {len(self.lent)} that are lent")
        self.map[pages] = self.lent[blocks]
        self.known[pages] = True


def _seconds(told: float) -> float:
    """A number that anybody may have written."""
    return min(told, _LONGEST) if told > 0 else 0.0


def _inside(ids: AnyArray, count: int) -> bool:
    return not ids.size or bool(ids.min() >= 0 and ids.max() < count)
