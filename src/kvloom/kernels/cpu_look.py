"""When a step looks for another unit's tasks, and what lay between two looks."""

import ctypes

import numpy as np
from numba import carray, njit

from kvloom.kernels.cpu_poll import busy, enter, leave, look_for_task, nanoseconds
from kvloom.kernels.memory import pointer_at


class LookArguments(ctypes.Structure):
    """Of one step, for the thread that looks. pieces [most]: nanoseconds from each look to the next, less
    what tasks took of them; `count` are there. last, before: when it looked, and what they had taken by then.
    clock: 16 bytes."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("poll", "pieces", "most", "count", "last", "before")),
        ("clock", ctypes.c_int64 * 2),
    ]


_LOOK = np.dtype(LookArguments)
_CLOCK = LookArguments.clock.offset


@njit(inline="never")
def start(address):  # type: ignore[no-untyped-def]
    """The step begins. address: of LookArguments, in what follows too."""
    a = carray(pointer_at(address), 1, _LOOK)[0]
    enter(a.poll, address + _CLOCK)
    a.count = 0
    a.last, a.before = nanoseconds(address + _CLOCK), busy(a.poll)


@njit(inline="never")
def look(address):  # type: ignore[no-untyped-def]
    """Between two parts."""
    a = carray(pointer_at(address), 1, _LOOK)[0]
    now, others = nanoseconds(address + _CLOCK), busy(a.poll)
    if a.count < a.most:
        carray(pointer_at(a.pieces), a.most, np.int64)[a.count] = now - a.last - (others - a.before)
        a.count += 1
    a.last, a.before = now, others
    look_for_task(a.poll)


@njit(inline="never")
def finish(address):  # type: ignore[no-untyped-def]
    """The step is over."""
    leave(carray(pointer_at(address), 1, _LOOK)[0].poll, address + _CLOCK)


@njit(inline="never")
def look_when_due(address, taken, items, parts):  # type: ignore[no-untyped-def]
    """After `taken` of `items`, but for the last: look if one of `parts` parts has ended with it. 0 parts are
    never looked after."""
    if taken < items and taken * parts // items != (taken - 1) * parts // items:
        look(address)
