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
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvloom.kernels.mail import HEAD, LINE, NOTE, WORDS, End
from kvloom.kv import arena as memfd
from kvloom.transfer.fenced import Count, Memory
from kvloom.transport.word import Word
from kvloom.types.errors import ConfigError
from kvloom.types.geometry import I32, AnyArray

__all__ = [
    "ENDS",
    "FLOATS",
    "HEAD",
    "NOTE",
    "START",
    "WHAT",
    "End",
    "Mailbox",
    "MailboxForm",
    "OwnMailbox",
    "Place",
    "end_of",
    "size_of",
]

WHAT = "mailbox"
START: Final = (1 << 32) - 1000  # of counters: they wrap soon, not first after days
_INTS: Final = np.dtype("<i4")
FLOATS: Final = np.dtype("<f4")
ENDS: Final[Mapping[int, str]] = {
    End.CLOSED: "wants its blocks back",
    End.FORGED: "refuses what this unit wrote to it",
    End.FAILED: "failed to attend",
}
"""What a lender does that has ended a loan."""
_DOUBLES: Final = np.dtype("<f8")


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

    borrower: posted, waiting, left; head, pace [2], lengths [rows], tables [rows, width], changed [pages],
        map [pages, layers, kv_heads], notes [slots], qkv [slots, rows, heads + 2 kv_heads, head_dim].
    lender: done, asleep, over; out [slots, rows, heads, head_dim].
    """

    def __init__(self, fd: int, form: MailboxForm) -> None:
        self.form = form
        self._map = mmap.mmap(fd, size_of(form))
        memory: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        base = memory.ctypes.data
        self.posted, self.done, self.asleep, self.waiting, self.left, self.over = (
            Word(base + i * LINE) for i in range(len(WORDS))
        )
        parts: dict[str, AnyArray] = {
            name: memory[part.at : part.at + part.size].view(part.dtype).reshape(part.shape)
            for name, part in layout(form).items()
        }
        self.head: AnyArray = parts["head"]
        self.pace: npt.NDArray[np.float64] = parts["pace"]
        self.lengths: I32 = parts["lengths"]
        self.tables: I32 = parts["tables"]
        self.changed: I32 = parts["changed"]
        self.map: I32 = parts["map"]
        self.notes: AnyArray = parts["notes"]
        self.qkv: npt.NDArray[np.float32] = parts["qkv"]
        self.out: npt.NDArray[np.float32] = parts["out"]


class Part(NamedTuple):
    """An array of a mailbox: bytes from `at` on."""

    at: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.void] | np.dtype[np.generic]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def layout(form: MailboxForm, values: np.dtype[np.generic] = FLOATS) -> dict[str, Part]:
    """Where its arrays are, after its words; each begins a cache line. values: of q, k, v and the output."""
    shapes: dict[str, tuple[tuple[int, ...], np.dtype[np.void] | np.dtype[np.generic]]] = {
        "head": ((1,), HEAD),
        "pace": ((2,), _DOUBLES),
        "lengths": ((form.rows,), _INTS),
        "tables": ((form.rows, form.width), _INTS),
        "changed": ((form.pages,), _INTS),
        "map": ((form.pages, form.layers, form.kv_heads), _INTS),
        "notes": ((form.slots,), NOTE),
        "qkv": ((form.slots, form.rows, form.heads + 2 * form.kv_heads, form.head_dim), values),
        "out": ((form.slots, form.rows, form.heads, form.head_dim), values),
    }
    parts: dict[str, Part] = {}
    at = len(WORDS) * LINE
    for name, (shape, dtype) in shapes.items():
        parts[name] = Part(at, shape, dtype)
        at += _padded(parts[name].size)
    return parts


def size_of(form: MailboxForm, values: np.dtype[np.generic] = FLOATS) -> int:
    """Bytes."""
    last = layout(form, values)["out"]
    return last.at + _padded(last.size)


def refuse_slots(form: MailboxForm) -> None:
    """Raises ConfigError where a slot would not stay count mod slots when counters wrap."""
    if form.slots & (form.slots - 1) or not form.slots:
        raise ConfigError(f"a mailbox of {form.slots} slots; want a power of two")


def _padded(size: int) -> int:
    return -(-size // LINE) * LINE


class OwnMailbox:
    """The lender's: made here, open to the borrower as long as its descriptor is."""

    def __init__(self, form: MailboxForm, start: int = START) -> None:
        """start: what the counters begin with. Raises ConfigError where the system gives no memory."""
        refuse_slots(form)
        self._fd = memfd.create(WHAT)
        try:
            os.posix_fallocate(self._fd, 0, size_of(form))
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(
                f"weave: the system gives no {size_of(form):,} bytes of shared memory ({error.strerror})"
            ) from error
        memfd.seal(self._fd)
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


def end_of(unit: str, status: int, known: Mapping[int, str] = ENDS) -> str:
    """Why the loan of `unit` is over, in words."""
    return f"{unit} {known.get(status) or f'ended the loan with {status}'}"
