"""A mailbox: shared memory through which one unit has another attend for it (Weaver, section 4.1).

The lender makes it, the borrower maps it. Each word has one writer and a cache line of its own; each array is
written by one side, before the word that tells of it. Words count up and wrap at 2³²; a ring has a power of
two slots, so that a slot stays count mod slots when they do.

    borrower                                   lender
    rows, pages ─┐ once an iteration
    q, k, v      ├─> posted ────────────────────>  looks at `posted`; runs the task
    note        ─┘                                           out ─> done ──> the borrower takes `out`

What the borrower writes may be anything: the lender copies the descriptor and the note before it checks them
(see `lender.py`), and q, k and v are numbers, of which nothing is decided.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvloom.kernels.cpu.memory import SignalArguments, look, spin, swap, tell, try_take
from kvloom.kernels.mailbox import HEAD, LINE, NOTE, WORDS, End
from kvloom.kv.arena import create_memfd, seal_memfd
from kvloom.transfer.fenced import Count, Memory
from kvloom.types.errors import BadRequest, ConfigError
from kvloom.types.geometry import I32, I64, AnyArray

MASK: Final = 0xFFFFFFFF
_CALLS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1  # of words that processes share
WHAT = "mailbox"
START: Final = (1 << 32) - 1000  # of counters: they wrap soon, not first after days
_INTS: Final = np.dtype("<i4")
FLOATS: Final = np.dtype("<f4")
ENDS: Final[Mapping[int, str]] = {
    End.CLOSED: "wants its blocks back",
    End.FORGED: "refuses what this unit wrote to it",
    End.FAILED: "failed to attend",
}
"""The reasons that a lender gives for having ended a loan."""
_DOUBLES: Final = np.dtype("<f8")


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def futex_number() -> int:
    """Returns the number of the system call. Raises ConfigError if it is not known for this machine."""
    machine = platform.machine()
    if machine not in _CALLS:
        raise ConfigError(f"weave: this machine is {machine}; want one of {', '.join(_CALLS)}")
    return _CALLS[machine]


@cache
def _futex() -> Any:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    number = ctypes.c_long(futex_number())

    def futex(address: int, operation: int, value: int, timeout: Any) -> int:
        found: int = call(
            number,
            ctypes.c_void_p(address),
            ctypes.c_int(operation),
            ctypes.c_uint32(value),
            timeout,
            None,
            ctypes.c_uint32(0),
        )
        return found

    return futex


class SharedCounter:
    """A 32-bit word that two processes share: stored, looked at, and slept on; any thread may use it.

    Sleeping is by futex, because it needs nothing but the word: no descriptor has to reach the peer (an
    eventfd cannot be opened through /proc), it goes with the memory, and the kernel looks at the word itself
    once more before the caller sleeps, so no wake is lost. A peer that dies wakes nobody: callers sleep in
    bounded slices."""

    def __init__(self, address: int) -> None:
        """address: a multiple of 4, of memory that the caller keeps."""
        self.address = address

    def get(self) -> int:
        """Loads with acquire order: all that its writer stored before is seen from here on."""
        call = SignalArguments(self.address, 0, 0)
        look(call, 1)
        return int(call.value)

    def set(self, value: int) -> None:
        """Stores with release order: a reader that sees the value sees all that was stored before it."""
        tell(SignalArguments(self.address, value & MASK, 0), 1)

    def swap(self, value: int) -> int:
        """Stores, and returns the value before. Later reads happen after the store is seen."""
        call = SignalArguments(self.address, value & MASK, 0)
        swap(call, 1)
        return int(call.value)

    def try_take(self) -> bool:
        """Stores 1 if the word is 0, and returns whether it was."""
        call = SignalArguments(self.address, 0, 0)
        try_take(call, 1)
        return bool(call.value)

    def spin(self, seen: int, spins: int) -> int:
        """Looks until the word differs from `seen`, `spins` times at most, without the GIL. Returns the
        word."""
        call = SignalArguments(self.address, seen & MASK, spins)
        spin(call, 1)
        return int(call.value)

    def sleep(self, seen: int, seconds: float) -> None:
        """Sleeps until `wake`, at most so long; not at all if the word is not `seen`. May return early."""
        whole = int(seconds)
        limit = _Timespec(whole, int((seconds - whole) * 1e9))
        if _futex()(self.address, _WAIT, seen & MASK, ctypes.byref(limit)) < 0:
            reason = ctypes.get_errno()
            if reason not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
                raise OSError(reason, os.strerror(reason))

    def wake(self) -> None:
        """Wakes all who sleep on the word."""
        _futex()(self.address, _WAKE, 0x7FFFFFFF, None)


class MailboxForm(Struct, frozen=True, array_like=True):
    """The sizes of a mailbox: tasks at a time (a power of two), rows of a task, pages of a row and of all
    rows, and those of the model."""

    slots: Count
    rows: Count
    width: Count
    pages: Count
    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count


class MailboxPlace(Struct, frozen=True, array_like=True):
    """The place of a mailbox: a memfd of process `pid`."""

    pid: Count
    memory: Memory
    form: MailboxForm


class OffloadMailbox:
    """The shared memory of a loan, mapped for as long as this lives. Its fields, by writer:

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
            SharedCounter(base + i * LINE) for i in range(len(WORDS))
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


class MailboxArray(NamedTuple):
    """An array of a mailbox: its bytes begin at `at`."""

    at: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.void] | np.dtype[np.generic]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def layout(form: MailboxForm, values: np.dtype[np.generic] = FLOATS) -> dict[str, MailboxArray]:
    """Returns the places of the arrays, after the words; each begins a cache line. values: the type of q, k,
    v and the output."""
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
    parts: dict[str, MailboxArray] = {}
    at = len(WORDS) * LINE
    for name, (shape, dtype) in shapes.items():
        parts[name] = MailboxArray(at, shape, dtype)
        at += _padded(parts[name].size)
    return parts


def size_of(form: MailboxForm, values: np.dtype[np.generic] = FLOATS) -> int:
    """Returns the bytes of a mailbox."""
    last = layout(form, values)["out"]
    return last.at + _padded(last.size)


def refuse_slots(form: MailboxForm) -> None:
    """Raises ConfigError if a slot would not stay count mod slots when counters wrap."""
    if form.slots & (form.slots - 1) or not form.slots:
        raise ConfigError(f"a mailbox of {form.slots} slots; want a power of two")


def changed_pages(form: MailboxForm, tables: I32, versions: I64, told: I64) -> I64:
    """Returns the pages in tables [B, P] whose row of the page map is not the one that was told, and notes
    their versions in `told`; both are [pages]. Raises BadRequest if the mailbox takes fewer rows or pages."""
    rows, width = tables.shape
    if not 0 < rows <= form.rows or width > form.width:
        raise BadRequest(f"weave: {rows} rows of {width} pages; want {form.rows} of {form.width} at most")
    used = np.unique(tables).astype(np.int64)
    changed: I64 = used[versions[used] != told[used]]
    told[changed] = versions[changed]
    return changed


def _padded(size: int) -> int:
    return -(-size // LINE) * LINE


class LenderMailbox:
    """The lender's mailbox: made here, open to the borrower as long as its descriptor is."""

    def __init__(self, form: MailboxForm, start: int = START) -> None:
        """start: the number at which the counters begin. Raises ConfigError if the system gives no memory."""
        refuse_slots(form)
        self._fd = create_memfd(WHAT)
        try:
            os.posix_fallocate(self._fd, 0, size_of(form))
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(
                f"weave: the system gives no {size_of(form):,} bytes of shared memory ({error.strerror})"
            ) from error
        seal_memfd(self._fd)
        self.memory = OffloadMailbox(self._fd, form)
        self.memory.posted.set(start)
        self.memory.done.set(start)
        self._place = MailboxPlace(os.getpid(), Memory.of(self._fd), form)

    @property
    def place(self) -> bytes:
        return msgspec.msgpack.encode(self._place)

    def close(self) -> None:
        """Lets no other process find the mailbox any more; a process that has mapped it keeps it."""
        os.close(self._fd)


def end_of(unit: str, status: int, known: Mapping[int, str] = ENDS) -> str:
    """Returns why the loan of `unit` is over, in words."""
    return f"{unit} {known.get(status) or f'ended the loan with {status}'}"
