"""Looks for another unit's tasks between two parts of a kernel, and does them at once (Weaver, section 4.1):
without the host, whose language has a lock that others hold, and which is asked only once an iteration of
that unit, to check what its tasks are over."""

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit, types
from numba.extending import intrinsic

from kvloom.kernels.cpu_attention import ALL, AttentionArguments, attend
from kvloom.kernels.parallel import kernel
from kvloom.kernels.signals import acquire, exchange, take
from kvloom.kernels.vector import observe, pointer_at, read_double

MASK = 0xFFFFFFFF
HELD, AWAITED = 1, 2  # the lock word, where it is not 0: taken; taken, and somebody sleeps until it is not
_WAKE, _EVERYBODY = 1, 0x7FFFFFFF
_MOST = 10_000_000_000  # nanoseconds: of a wait; the stamp that it begins with is another process'
_MONOTONIC = 1
_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))


class PollArguments(ctypes.Structure):
    """Of one loan; whoever has `lock` writes them. Addresses: lock and the mailbox' words posted, left,
    finished and waiting; notes, qkv and out, whose slots are so many bytes apart; map, of the first layer;
    task, the AttentionArguments that are filled in for each; host, int64(), called with the lock for what is
    to be checked first: not 0 where nothing is to be done; clock, 16 bytes.

    iteration: the one whose rows `task` is for; −1 for none. done: the number of the last task that is;
    tasks: how many; waits and services: of the last `kept` of them, in nanoseconds; busy: nanoseconds for
    all. stamp: where in a note it says when it was posted. k_bytes and v_bytes: from q to k and to v. futex:
    the system call's number."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("lock", "posted", "left", "finished", "waiting")),
        *((name, ctypes.c_int64) for name in ("notes", "note_bytes", "stamp", "slots", "layers")),
        *((name, ctypes.c_int64) for name in ("qkv", "qkv_slot", "out", "out_slot", "k_bytes", "v_bytes")),
        *((name, ctypes.c_int64) for name in ("map", "map_layer", "task", "host", "clock", "futex")),
        *((name, ctypes.c_int64) for name in ("iteration", "rows", "done")),
        *((name, ctypes.c_int64) for name in ("tasks", "kept", "waits", "services", "busy")),
    ]


_POLL = np.dtype(PollArguments)
_TASK = np.dtype(AttentionArguments)


@intrinsic  # type: ignore[untyped-decorator]
def _call(context: Any, address: Any) -> Any:
    """A function of nothing, at this address."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [])
        return builder.call(builder.inttoptr(values[0], kind.as_pointer()), [])

    return types.int64(types.int64), generate


@njit(inline="never")
def nanoseconds(scratch):  # type: ignore[no-untyped-def]
    """The machine's monotonic clock, the same in all its processes. scratch: the address of 16 bytes."""
    _clock(_MONOTONIC, scratch)
    return observe(scratch) * 1_000_000_000 + observe(scratch + 8)


@njit(inline="never")
def _wake(p, word):  # type: ignore[no-untyped-def]
    _syscall(p.futex, word, _WAKE, _EVERYBODY, 0, 0, 0)


@njit(inline="never")
def _signed(word):  # type: ignore[no-untyped-def]
    return word - 0x100000000 if word > 0x7FFFFFFF else word


@njit(inline="never")
def _do(p, note, slot, layer):  # type: ignore[no-untyped-def]
    """Append and attend in one: q and k come turned and normalised."""
    begin = nanoseconds(p.clock)
    task = carray(pointer_at(p.task), 1, _TASK)[0]
    task.q = p.qkv + slot * p.qkv_slot
    task.k, task.v = task.q + p.k_bytes, task.q + p.v_bytes
    task.out = p.out + slot * p.out_slot
    task.map = p.map + layer * p.map_layer
    task.window = max(0, _signed(acquire(note + 12)))
    task.scale, task.softcap = read_double(note + 16), read_double(note + 24)
    task.next = 0
    task.done = 0
    attend(task, p.task, ALL)
    wait = min(_MOST, max(0, begin - observe(note + p.stamp)))
    at = p.tasks % p.kept
    carray(pointer_at(p.waits), p.kept, np.int64)[at] = wait
    carray(pointer_at(p.services), p.kept, np.int64)[at] = nanoseconds(p.clock) - begin
    p.tasks += 1
    p.done = (p.done + 1) & MASK
    exchange(p.finished, p.done)
    if acquire(p.waiting) != 0:
        _wake(p, p.finished)


@njit(inline="never")
def _serve(p):  # type: ignore[no-untyped-def]
    """Under the lock. Each number of a note is loaded once: who has written it may do so again meanwhile. At
    most two rounds of all slots, however fast new tasks come."""
    for _ in range(2 * p.slots):
        waiting = (acquire(p.posted) - p.done) & MASK
        if waiting == 0 or acquire(p.left) != 0:
            return
        slot = p.done & (p.slots - 1)
        note = p.notes + slot * p.note_bytes
        iteration, layer, rows = acquire(note), acquire(note + 4), acquire(note + 8)
        if waiting > p.slots or iteration != p.iteration or layer >= p.layers or rows != p.rows:
            if _call(p.host) != 0:
                return
        else:
            _do(p, note, slot, layer)


@njit(inline="never")
def look_for_task(address):  # type: ignore[no-untyped-def]
    """Do what is there, unless another thread is at it. address: of PollArguments."""
    p = carray(pointer_at(address), 1, _POLL)[0]
    if (acquire(p.posted) - p.done) & MASK == 0 or take(p.lock) == 0:
        return
    begin = nanoseconds(p.clock)
    _serve(p)
    p.busy += nanoseconds(p.clock) - begin
    if exchange(p.lock, 0) == AWAITED:
        _wake(p, p.lock)


@njit(inline="never")
def busy(address):  # type: ignore[no-untyped-def]
    """Nanoseconds that tasks have taken."""
    return carray(pointer_at(address), 1, _POLL)[0].busy


class PollOnce(ctypes.Structure):
    _fields_ = [("poll", ctypes.c_int64)]


@kernel(PollOnce)
def poll_once(pointer):  # type: ignore[no-untyped-def]
    look_for_task(carray(pointer, 1)[0].poll)
