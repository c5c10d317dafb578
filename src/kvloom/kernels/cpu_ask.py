"""Has another unit attend for some rows of a step (Weaver, section 4.1): posts a task for each layer, and
takes its output when the rows that are here are attended for, all without the host. Who waits too long, or
sees that something is wrong, leaves it to the host to wait on, or to say what."""

import ctypes

import numpy as np
from numba import carray, njit, types

from kvloom.kernels.cpu_attention import turn
from kvloom.kernels.cpu_poll import MASK, nanoseconds
from kvloom.kernels.cpu_stages import wait
from kvloom.kernels.mail import NOTE
from kvloom.kernels.memory import fetch_add, pointer_at, write
from kvloom.kernels.rows import copy_row
from kvloom.kernels.signals import acquire, exchange, wake

NOWHERE = -1
_SPINS = 2000  # looks before the core is offered to others at each further one
_yield = types.ExternalFunction("sched_yield", types.int32())


class AskArguments(ctypes.Structure):
    """Of one loan. Addresses: the mailbox' words posted, finished, asleep and over; notes, qkv and out, whose
    slots are so many bytes apart, and whose rows have qkv_row and out_row bytes; meanwhile [layers], where
    the kernel says what the rows that are here took, in nanoseconds; clock, 16 bytes. futex: the system
    call's number. spins: looks for an output, at most. count: the number of the last task that was posted.

    Of a step: iteration; rows that are away, `first` the first of them; lost: not 0 where nobody is asked,
    and their attention is zeros; paused: the layer whose output the host is to wait for, or NOWHERE; refused:
    not 0 where it is to post the task, too; resume: the layer after whose attention to go on, or NOWHERE;
    went: when the last task was posted, by the monotonic clock."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("posted", "finished", "asleep", "over", "notes", "note_bytes")),
        *((name, ctypes.c_int64) for name in ("slots", "qkv", "qkv_slot", "qkv_row")),
        *((name, ctypes.c_int64) for name in ("out", "out_slot", "out_row")),
        *((name, ctypes.c_int64) for name in ("meanwhile", "clock", "futex", "spins", "count")),
        *((name, ctypes.c_int64) for name in ("iteration", "rows", "first", "lost")),
        *((name, ctypes.c_int64) for name in ("paused", "refused", "resume", "went")),
    ]


_ASK = np.dtype(AskArguments)


@njit(inline="never")
def resumed_at(address):  # type: ignore[no-untyped-def]
    """The layer; NOWHERE for from the beginning. address: of AskArguments, or 0."""
    return NOWHERE if address == 0 else carray(pointer_at(address), 1, _ASK)[0].resume


@njit(inline="never")
def _send(a, attention, layer):  # type: ignore[no-untyped-def]
    """All rows lie in the slot."""
    if acquire(a.finished) != a.count or acquire(a.over) != 0:
        a.refused = 1
        return
    note = carray(pointer_at(a.notes + (a.count & (a.slots - 1)) * a.note_bytes), 1, NOTE)[0]
    note.iteration, note.layer, note.rows, note.window = a.iteration, layer, a.rows, attention.window
    note.scale, note.softcap = attention.scale, attention.softcap
    a.went = nanoseconds(a.clock)
    note.posted = a.went
    a.count = (a.count + 1) & MASK
    exchange(a.posted, a.count)  # a full barrier: who is not asleep now looks once more before it is
    if acquire(a.asleep) != 0:
        wake(a.futex, a.posted)


@njit(inline="never")
def post(address, attention, layer, counters):  # type: ignore[no-untyped-def]
    """Bring the rows away into the mailbox; who brings the last one posts the task, and counts that, too."""
    a = carray(pointer_at(address), 1, _ASK)[0]
    if a.lost != 0:
        return
    slot = a.qkv + (a.count & (a.slots - 1)) * a.qkv_slot
    row = fetch_add(counters, 1)
    while row < a.rows:
        turn(attention, a.first + row, 0, attention.kv_heads)
        copy_row(slot + row * a.qkv_row, attention.q + (a.first + row) * attention.q_row, a.qkv_row)
        if fetch_add(counters + 8, 1) == a.rows - 1:
            _send(a, attention, layer)
            fetch_add(counters + 8, 1)
        row = fetch_add(counters, 1)


@njit(inline="never")
def _arrived(a):  # type: ignore[no-untyped-def]
    """Wait for the output. False where the host is to do so."""
    turns = 0
    done = acquire(a.finished)
    while done == (a.count - 1) & MASK and turns < a.spins:
        turns += 1
        if turns > _SPINS:
            if acquire(a.over) != 0:
                return False
            _yield()
        done = acquire(a.finished)
    return done == a.count


@njit(inline="never")
def _take(a, attention, layer, posting):  # type: ignore[no-untyped-def]
    to = attention.out + a.first * attention.out_row
    if a.lost != 0:
        for row in range(a.rows):
            for i in range(0, a.out_row, 4):
                write(to + row * attention.out_row + i, 0.0)
        return
    wait(posting, a.rows + 1)
    if a.refused != 0:
        a.paused = layer
        return
    now = nanoseconds(a.clock)
    carray(pointer_at(a.meanwhile), layer + 1, np.int64)[layer] = now - a.went
    if not _arrived(a):
        a.paused = layer
        return
    slot = a.out + ((a.count - 1) & (a.slots - 1)) * a.out_slot
    for row in range(a.rows):
        copy_row(to + row * attention.out_row, slot + row * a.out_row, a.out_row)


@njit(inline="never")
def collect(address, attention, layer, posting, counters):  # type: ignore[no-untyped-def]
    """One thread takes the output, the others wait for it. False: the host has to, and the step ends here.
    posting: the counters that the task was posted by."""
    a = carray(pointer_at(address), 1, _ASK)[0]
    if fetch_add(counters, 1) == 0:
        _take(a, attention, layer, posting)
        fetch_add(counters + 8, 1)
    wait(counters, 1)
    return a.paused == NOWHERE
