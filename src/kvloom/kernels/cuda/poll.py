"""Reads and writes of words that others read and write meanwhile.

PTX, "Memory Consistency Model": an atomic of no effect with acquire order is a load that orders what comes
after it; one thread of the program does it and hands it to all, so they agree on what was seen, which they
would not on a plain load. A release orders what the same thread has stored; a barrier before it, what its
program has.
"""

from __future__ import annotations

import triton
import triton.language as tl

MASK = tl.constexpr(0xFFFFFFFF)


@triton.jit
def look(word):  # type: ignore[no-untyped-def]
    """Loads what another process writes."""
    return tl.atomic_add(word, 0, sem="acquire", scope="sys")


@triton.jit
def look_here(word):  # type: ignore[no-untyped-def]
    """Loads what other programs of this device write."""
    return tl.atomic_add(word, 0, sem="acquire", scope="gpu")


@triton.jit
def tell(word, value):  # type: ignore[no-untyped-def]
    """Stores a word for another process. What this program stored before is seen with it, and what others did
    that it has counted by `is_last`."""
    tl.debug_barrier()
    tl.atomic_xchg(word, value, sem="release", scope="sys")


@triton.jit
def tell_here(word, value):  # type: ignore[no-untyped-def]
    """Stores a word for other programs of this device."""
    tl.debug_barrier()
    tl.atomic_xchg(word, value, sem="release", scope="gpu")


@triton.jit
def is_last(count):  # type: ignore[no-untyped-def]
    """Returns whether all other programs of the launch have called this; it then sees all that they stored.
    The count begins at 0, and is 0 again."""
    tl.debug_barrier()
    last = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1
    if last:
        tl.atomic_xchg(count, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def blame(status, why):  # type: ignore[no-untyped-def]
    """Writes down why, unless something is there already."""
    tl.atomic_cas(status, 0, why, sem="acq_rel", scope="gpu")


@triton.jit
def ahead(one, other):  # type: ignore[no-untyped-def]
    """Returns by how much a counter is ahead of another: int64, below 2³²."""
    return (one.to(tl.int64) - other.to(tl.int64)) & MASK


@triton.jit
def after(count):  # type: ignore[no-untyped-def]
    """Returns the next value of a counter."""
    return ((count.to(tl.int64) + 1) & MASK).to(tl.int32)
