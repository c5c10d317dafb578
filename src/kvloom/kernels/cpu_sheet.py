"""Checks what another unit's tasks of one iteration are over, without the host, whose language has a lock
that others hold. It takes what is right, and nothing else; why something is not is for the host to say
(`transport/attending.py`, which keeps to the same rules)."""

import ctypes

import numpy as np
from numba import carray, njit

from kvloom.kernels.memory import pointer_at
from kvloom.kernels.signals import acquire


class SheetArguments(ctypes.Structure):
    """Addresses in the mailbox, which the borrower may write at any time: head, their_lengths, their_tables
    [rows, width], changed, told (its map). Ours: lent [blocks] own ones, as the borrower counts them; map
    [pages, blocks of a page] and known [pages] bool, of what it has told so far; and of the iteration,
    lengths, tables, slot_page and slot_offset, as `Sheet` has them. rows, width, pages: the most that there
    may be."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("head", "their_lengths", "their_tables", "changed", "told")),
        *((name, ctypes.c_int64) for name in ("lent", "blocks", "map", "known", "lengths", "tables")),
        *((name, ctypes.c_int64) for name in ("slot_page", "slot_offset")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "pages", "page_blocks", "page_tokens")),
    ]


_SHEET = np.dtype(SheetArguments)


@njit(inline="never")
def _take(s, page):  # type: ignore[no-untyped-def]
    """A row of the borrower's map that it has changed; False where that names what is not lent."""
    if page >= s.pages:
        return False
    lent = carray(pointer_at(s.lent), s.blocks, np.int32)
    own = carray(pointer_at(s.map), s.pages * s.page_blocks, np.int32)
    for i in range(page * s.page_blocks, (page + 1) * s.page_blocks):
        block = acquire(s.told + i * 4)
        if block >= s.blocks:
            return False
        own[i] = lent[block]
    carray(pointer_at(s.known), s.pages, np.uint8)[page] = 1
    return True


@njit(inline="never")
def _row(s, row):  # type: ignore[no-untyped-def]
    """One sequence; False where it has no such length, or pages that nobody told of."""
    length = acquire(s.their_lengths + row * 4)
    if length < 1 or length > s.width * s.page_tokens:
        return False
    known = carray(pointer_at(s.known), s.pages, np.uint8)
    tables = carray(pointer_at(s.tables), s.rows * s.width, np.int32)
    page = 0
    for i in range((length + s.page_tokens - 1) // s.page_tokens):
        page = acquire(s.their_tables + (row * s.width + i) * 4)
        if page >= s.pages or known[page] == 0:
            return False
        tables[row * s.width + i] = page
    carray(pointer_at(s.lengths), s.rows, np.int32)[row] = length
    carray(pointer_at(s.slot_page), s.rows, np.int32)[row] = page
    carray(pointer_at(s.slot_offset), s.rows, np.int32)[row] = (length - 1) % s.page_tokens
    return True


@njit(inline="never")
def check(address, iteration):  # type: ignore[no-untyped-def]
    """Copy the sheet of `iteration`, and return its rows; 0 where it breaks a rule. Each number is loaded
    once, for it may change meanwhile; a negative one counts as a large one. address: of SheetArguments."""
    s = carray(pointer_at(address), 1, _SHEET)[0]
    if acquire(s.head) != iteration:
        return 0
    rows, changed = acquire(s.head + 4), acquire(s.head + 8)
    if rows < 1 or rows > s.rows or changed > s.pages:
        return 0
    for i in range(changed):
        if not _take(s, acquire(s.changed + i * 4)):
            return 0
    for row in range(rows):
        if not _row(s, row):
            return 0
    return rows
