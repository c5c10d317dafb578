"""Sleeps until another unit's task comes while no forward looks for them, and does it: without the host."""

import ctypes

import numpy as np
from numba import carray, njit

from kvloom.kernels.cpu_poll import PollArguments, look_for_task, nanoseconds
from kvloom.kernels.memory import fetch_add, observe, pointer_at
from kvloom.kernels.parallel import kernel
from kvloom.kernels.signals import acquire, exchange, release, sleep

_POLL = np.dtype(PollArguments)
_WORKING, _RESTING = PollArguments.working.offset, PollArguments.resting.offset


class WatchArguments(ctypes.Structure):
    """clock: 16 bytes of its own; limit: of one sleep, a timespec; nanoseconds: of it all."""

    _fields_ = [(name, ctypes.c_int64) for name in ("poll", "clock", "limit", "nanoseconds")]


@njit(inline="never")
def _rest(address, limit):  # type: ignore[no-untyped-def]
    """While a forward looks for tasks nobody is to be woken for them; it says when it does no more."""
    p = carray(pointer_at(address), 1, _POLL)[0]
    fetch_add(address + _RESTING, 1)
    seen = p.done
    if observe(address + _WORKING) == 0:
        exchange(p.asleep, 1)
    else:
        seen = acquire(p.posted)
    if acquire(p.left) == 0 and p.closed == 0:
        sleep(p.futex, p.posted, seen, limit)
    fetch_add(address + _RESTING, -1)
    release(p.asleep, 0)


@kernel(WatchArguments)
def watch(pointer):  # type: ignore[no-untyped-def]
    """Until the time is over, the borrower has left, or the loan has ended."""
    a = carray(pointer, 1)[0]
    p = carray(pointer_at(a.poll), 1, _POLL)[0]
    due = nanoseconds(a.clock) + a.nanoseconds
    while nanoseconds(a.clock) < due and p.closed == 0 and acquire(p.left) == 0:
        _rest(a.poll, a.limit)
        if observe(a.poll + _WORKING) == 0:
            look_for_task(a.poll)
