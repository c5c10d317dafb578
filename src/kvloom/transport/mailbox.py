"""A mailbox: shared memory through which one unit has another attend for it (Weaver, section 4.1).

The lender makes it, the borrower maps it. Each word has one writer and a cache line of its own; each array is
written by one side, before the word that tells of it. Words count up and wrap at 2³²; a ring has a power of
two slots, so that a slot stays count mod slots when they do.

    borrower                                   lender
    sheet ──┐ once an iteration
    q, k, v ├─> posted ────────────────────>  looks at `posted`; runs the task
    note  ──┘                                           out ─> done ──> the borrower takes `out`

What the borrower writes may be anything: the lender copies sheet and note before it checks them (see
`attending.py`), and q, k and v are numbers, of which nothing is decided.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvloom.core.arrays import I32, AnyArray
from kvloom.core.errors import ConfigError
from kvloom.kv import memfd
from kvloom.transport.peer import Count, Memory
from kvloom.transport.word import Word

WHAT = "mailbox"
_LINE = 64
_WORDS = ("posted", "done", "asleep", "waiting", "left", "over")
NOTE = np.dtype(
    [
        ("iteration", "<u4"),
        ("layer", "<i4"),
        ("rows", "<i4"),
        ("window", "<i4"),
        ("scale", "<f8"),
        ("softcap", "<f8"),
    ]
)
HEAD = np.dtype([("iteration", "<u4"), ("rows", "<i4"), ("changed", "<i4")])


class End(IntEnum):
    """Why a side takes no more part. None: it does."""

    NONE = 0
    CLOSED = 1  # it wants no more
    FORGED = 2  # the other's writings cannot be
    FAILED = 3  # it could not compute


class MailboxForm(Struct, frozen=True, array_like=True):
    """Sizes: tasks at a time (a power of two), rows a task, pages that a row and all rows have, and the
    model's."""

    slots: Count
    rows: Count
    width: Count
    pages: Count
    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count


class Place(Struct, frozen=True, array_like=True):
    """Where a mailbox is: a memfd of process `pid`."""

    pid: Count
    memory: Memory
    form: MailboxForm


class Mailbox:
    """The memory, mapped for as long as this lives. Writers, by field:

    borrower: posted, waiting, left; head, lengths [rows], tables [rows, width], changed [pages],
        map [pages, layers, kv_heads], notes [slots], qkv [slots, rows, heads + 2 kv_heads, head_dim].
    lender: done, asleep, over; out [slots, rows, heads, head_dim].
    """

    def __init__(self, fd: int, form: MailboxForm) -> None:
        self.form = form
        self._map = mmap.mmap(fd, size_of(form))
        memory: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        base = memory.ctypes.data
        self.posted, self.done, self.asleep, self.waiting, self.left, self.over = (
            Word(base + i * _LINE) for i in range(len(_WORDS))
        )
        parts: dict[str, AnyArray] = {}
        at = len(_WORDS) * _LINE
        for name, (shape, dtype) in _layout(form).items():
            size = int(np.prod(shape)) * dtype.itemsize
            parts[name] = memory[at : at + size].view(dtype).reshape(shape)
            at += _padded(size)
        self.head: AnyArray = parts["head"]
        self.lengths: I32 = parts["lengths"]
        self.tables: I32 = parts["tables"]
        self.changed: I32 = parts["changed"]
        self.map: I32 = parts["map"]
        self.notes: AnyArray = parts["notes"]
        self.qkv: npt.NDArray[np.float32] = parts["qkv"]
        self.out: npt.NDArray[np.float32] = parts["out"]


def _layout(form: MailboxForm) -> dict[str, tuple[tuple[int, ...], np.dtype[np.void] | np.dtype[np.generic]]]:
    ints, floats = np.dtype("<i4"), np.dtype("<f4")
    return {
        "head": ((1,), HEAD),
        "lengths": ((form.rows,), ints),
        "tables": ((form.rows, form.width), ints),
        "changed": ((form.pages,), ints),
        "map": ((form.pages, form.layers, form.kv_heads), ints),
        "notes": ((form.slots,), NOTE),
        "qkv": ((form.slots, form.rows, form.heads + 2 * form.kv_heads, form.head_dim), floats),
        "out": ((form.slots, form.rows, form.heads, form.head_dim), floats),
    }


def size_of(form: MailboxForm) -> int:
    """Bytes."""
    sizes = (int(np.prod(shape)) * dtype.itemsize for shape, dtype in _layout(form).values())
    return len(_WORDS) * _LINE + sum(map(_padded, sizes))


def _padded(size: int) -> int:
    return -(-size // _LINE) * _LINE


class OwnMailbox:
    """The lender's: made here, open to the borrower as long as its descriptor is."""

    def __init__(self, form: MailboxForm, start: int = 0) -> None:
        """start: what the counters begin with. Raises ConfigError where the system gives no memory."""
        if form.slots & (form.slots - 1) or not form.slots:
            raise ConfigError(f"a mailbox of {form.slots} slots; want a power of two")
        self._fd = memfd.create(WHAT)
        try:
            os.posix_fallocate(self._fd, 0, size_of(form))
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(
                f"weave: the system gives no {size_of(form):,} bytes of shared memory ({error.strerror})"
            ) from error
        self.memory = Mailbox(self._fd, form)
        self.memory.posted.set(start)
        self.memory.done.set(start)
        self._place = Place(os.getpid(), Memory.of(self._fd), form)

    @property
    def place(self) -> bytes:
        return msgspec.msgpack.encode(self._place)

    def close(self) -> None:
        """No other process finds it any more; who has mapped it keeps it."""
        os.close(self._fd)
