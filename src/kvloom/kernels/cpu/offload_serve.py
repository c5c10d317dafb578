"""Looks for another unit's tasks between two parts of a kernel, and does them at once (Weaver, section 4.1),
without the host's Python, whose lock (the GIL) others may hold. The host is asked only if something is not as
it should be, to say what."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types

from kvloom.kernels.cpu.attention.decode import AttentionArguments, attend
from kvloom.kernels.cpu.lanes.floats import operation, pointer
from kvloom.kernels.cpu.memory import (
    acquire,
    exchange,
    fetch_add,
    observe,
    pointer_at,
    read_double,
    release,
    sleep,
    take,
    wake,
)
from kvloom.kernels.cpu.parallel import kernel


class DescriptorArguments(ctypes.Structure):
    """The addresses that the check of a task descriptor needs. Those in the mailbox, which the borrower may
    write at any time: head, their_lengths, their_tables [rows, width], changed, told (its map). Those of our
    own: lent [blocks] own ones, as the borrower counts them; map [pages, blocks of a page] and known [pages]
    bool, of what it has told so far; and of the iteration, lengths, tables, slot_page and slot_offset, as
    `TaskDescriptor` has them. rows, width, pages: the most that there may be."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("head", "their_lengths", "their_tables", "changed", "told")),
        *((name, ctypes.c_int64) for name in ("lent", "blocks", "map", "known", "lengths", "tables")),
        *((name, ctypes.c_int64) for name in ("slot_page", "slot_offset")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "pages", "page_blocks", "page_tokens")),
    ]


_DESCRIPTOR = np.dtype(DescriptorArguments)


@njit(inline="never")
def _take(s, page):  # type: ignore[no-untyped-def]
    """Takes a row of the borrower's map that it has changed; returns False if that names what is not lent."""
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
    """Takes one sequence; returns False if it has no such length, or pages that nobody told of."""
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
    """Copies the task descriptor of `iteration`, and returns its rows; 0 if it breaks a rule. Each number is
    loaded once, for it may change meanwhile; a negative one counts as a large one. address: of
    DescriptorArguments."""
    s = carray(pointer_at(address), 1, _DESCRIPTOR)[0]
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


MASK = 0xFFFFFFFF
HELD, AWAITED = 1, 2  # the lock word if it is not 0: taken; taken, and somebody sleeps until it is not
_MOST = 10_000_000_000  # nanoseconds: of a wait; the stamp that it begins with is another process'
_MONOTONIC = 1
_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))


class PollArguments(ctypes.Structure):
    """The lender's part in one loan. Whoever has `lock` writes it, but for what `enter` and the thread that
    watches do. Addresses: lock and the mailbox' words posted, left, finished, waiting and asleep; notes, qkv
    and out, whose slots are so many bytes apart; map, of the first layer; descriptor, the
    DescriptorArguments; task, the AttentionArguments that are filled in for each; host, int64(), called with
    the lock if a task is not one that the descriptor allows: not 0 if nothing is to be done; clock, 16 bytes.

    iteration: the one whose rows `task` is for; −1 for none. closed: nobody but the host is to check any.
    done: the number of the last task that is; tasks: how many; waits and services: of the last `kept` of
    them, in nanoseconds; busy: nanoseconds for all. stamp: the offset in a note of when it was posted.
    k_bytes and v_bytes: from q to k and to v. futex: the system call's number.

    working: forwards that look for tasks; resting: 1 while a thread sleeps until one comes. since, until:
    when the last gap without such a forward began, and ended, 0 if it has not; served: `busy` when it began;
    gaps: nanoseconds of all, less what tasks took of them; met, delay: tasks that were posted in one, and
    what they waited for until they were found, by whomever.
    """

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("lock", "posted", "left", "finished", "waiting", "asleep")),
        *((name, ctypes.c_int64) for name in ("notes", "note_bytes", "stamp", "slots", "layers")),
        *((name, ctypes.c_int64) for name in ("qkv", "qkv_slot", "out", "out_slot", "k_bytes", "v_bytes")),
        *(
            (name, ctypes.c_int64)
            for name in ("map", "map_layer", "descriptor", "task", "host", "clock", "futex")
        ),
        *((name, ctypes.c_int64) for name in ("iteration", "closed", "rows", "done")),
        *((name, ctypes.c_int64) for name in ("tasks", "kept", "waits", "services", "busy")),
        *((name, ctypes.c_int64) for name in ("working", "resting", "since", "until", "served", "gaps")),
        *((name, ctypes.c_int64) for name in ("met", "delay")),
    ]


_POLL = np.dtype(PollArguments)
_TASK = np.dtype(AttentionArguments)
_WORKING, _RESTING = PollArguments.working.offset, PollArguments.resting.offset


@operation(types.int64, types.int64)
def _call(builder: Any, address: Any) -> Any:
    """Calls the function at this address, which takes nothing."""
    return builder.call(pointer(builder, address, ir.FunctionType(ir.IntType(64), [])), [])


@njit(inline="never")
def nanoseconds(scratch):  # type: ignore[no-untyped-def]
    """Returns the time of the machine's monotonic clock, the same in all its processes. scratch: the address
    of 16 bytes."""
    _clock(_MONOTONIC, scratch)
    return observe(scratch) * 1_000_000_000 + observe(scratch + 8)


@njit(inline="never")
def _signed(word):  # type: ignore[no-untyped-def]
    return word - 0x100000000 if word > 0x7FFFFFFF else word


@njit(inline="never")
def _waited(p, note, found):  # type: ignore[no-untyped-def]
    """Returns the nanoseconds from a note's stamp, which anybody may have written."""
    posted = observe(note + p.stamp)
    wait = min(_MOST, max(0, found - posted))
    if posted >= p.since and (p.until == 0 or posted < p.until):
        if p.met == p.kept:  # the older count half
            p.met //= 2
            p.delay //= 2
        p.met += 1
        p.delay += wait
    return wait


@njit(inline="never")
def _do(p, note, slot, layer, found):  # type: ignore[no-untyped-def]
    """Appends and attends in one: q and k come turned and normalised. A task counts as waiting until it is
    found; what is checked first counts as its own time."""
    task = carray(pointer_at(p.task), 1, _TASK)[0]
    task.q = p.qkv + slot * p.qkv_slot
    task.k, task.v = task.q + p.k_bytes, task.q + p.v_bytes
    task.out = p.out + slot * p.out_slot
    task.map = p.map + layer * p.map_layer
    task.window = max(0, _signed(acquire(note + 12)))
    task.scale, task.softcap = read_double(note + 16), read_double(note + 24)
    task.next = 0
    task.done = 0
    attend(task, p.task)
    at = p.tasks % p.kept
    carray(pointer_at(p.waits), p.kept, np.int64)[at] = _waited(p, note, found)
    carray(pointer_at(p.services), p.kept, np.int64)[at] = nanoseconds(p.clock) - found
    p.tasks += 1
    p.done = (p.done + 1) & MASK
    exchange(p.finished, p.done)
    if acquire(p.waiting) != 0:
        wake(p.futex, p.finished)


@njit(inline="never")
def _known(p, iteration):  # type: ignore[no-untyped-def]
    """Returns whether the rows of its descriptor are known, or can be."""
    if iteration != p.iteration and p.closed == 0:
        p.iteration = -1
        rows = check(p.descriptor, iteration)
        if rows != 0:
            carray(pointer_at(p.task), 1, _TASK)[0].batch = rows
            p.rows, p.iteration = rows, iteration
    return iteration == p.iteration


@njit(inline="never")
def _serve(p):  # type: ignore[no-untyped-def]
    """Serves tasks under the lock. Each number of a note is loaded once: whoever has written it may do so
    again meanwhile. It makes at most two rounds of all slots, however fast new tasks come."""
    for _ in range(2 * p.slots):
        waiting = (acquire(p.posted) - p.done) & MASK
        if waiting == 0 or acquire(p.left) != 0:
            return
        found = nanoseconds(p.clock)
        slot = p.done & (p.slots - 1)
        note = p.notes + slot * p.note_bytes
        iteration, layer, rows = acquire(note), acquire(note + 4), acquire(note + 8)
        if waiting > p.slots or layer >= p.layers or not _known(p, iteration) or rows != p.rows:
            if _call(p.host) != 0:
                return
        else:
            _do(p, note, slot, layer, found)


@njit(inline="never")
def look_for_task(address):  # type: ignore[no-untyped-def]
    """Does what is there, unless another thread is at it. address: of PollArguments."""
    p = carray(pointer_at(address), 1, _POLL)[0]
    if (acquire(p.posted) - p.done) & MASK == 0 or take(p.lock) == 0:
        return
    begin = nanoseconds(p.clock)
    _serve(p)
    p.busy += nanoseconds(p.clock) - begin
    if exchange(p.lock, 0) == AWAITED:
        wake(p.futex, p.lock)


@njit(inline="never")
def busy(address):  # type: ignore[no-untyped-def]
    """Returns the nanoseconds that tasks have taken."""
    return carray(pointer_at(address), 1, _POLL)[0].busy


@njit(inline="never")
def enter(address, clock):  # type: ignore[no-untyped-def]
    """The caller looks for tasks from here on, so nobody is woken for them. clock: 16 bytes of its own."""
    p = carray(pointer_at(address), 1, _POLL)[0]
    if fetch_add(address + _WORKING, 1) == 0:
        exchange(p.asleep, 0)
        if p.until == 0:
            p.until = nanoseconds(clock)
            if p.since != 0:
                p.gaps += max(0, p.until - p.since - (p.busy - p.served))
    look_for_task(address)


@njit(inline="never")
def leave(address, clock):  # type: ignore[no-untyped-def]
    """Ends the caller's looking for tasks: whoever sleeps until a task comes is to be woken. Either that
    thread sees that no forward works, or this one that it sleeps, because both exchange before they look."""
    p = carray(pointer_at(address), 1, _POLL)[0]
    look_for_task(address)
    if fetch_add(address + _WORKING, -1) != 1:
        return
    if observe(address + _RESTING) != 0:
        exchange(p.asleep, 1)
        look_for_task(address)
    # These are numbers alone: a forward that comes in between makes them a little wrong.
    if observe(address + _WORKING) == 0:
        p.since, p.served, p.until = nanoseconds(clock), p.busy, 0


class PollOnce(ctypes.Structure):
    """The arguments of one poll. clock: 16 bytes of the caller's own."""

    _fields_ = [("poll", ctypes.c_int64), ("clock", ctypes.c_int64)]


@kernel(PollOnce)
def poll_once(pointer):  # type: ignore[no-untyped-def]
    look_for_task(carray(pointer, 1)[0].poll)


@kernel(PollOnce)
def enter_once(pointer):  # type: ignore[no-untyped-def]
    a = carray(pointer, 1)[0]
    enter(a.poll, a.clock)


@kernel(PollOnce)
def leave_once(pointer):  # type: ignore[no-untyped-def]
    a = carray(pointer, 1)[0]
    leave(a.poll, a.clock)


class LookArguments(ctypes.Structure):
    """The arguments of one step, for the thread that looks. pieces [most]: nanoseconds from each look to the
    next, less what tasks took of them; `count` are there. last, before: when it looked, and what they had
    taken by then. clock: 16 bytes."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("poll", "pieces", "most", "count", "last", "before")),
        ("clock", ctypes.c_int64 * 2),
    ]


_LOOK = np.dtype(LookArguments)
_CLOCK = LookArguments.clock.offset


@njit(inline="never")
def start(address):  # type: ignore[no-untyped-def]
    """Begins a step. address: of LookArguments, in what follows too."""
    a = carray(pointer_at(address), 1, _LOOK)[0]
    enter(a.poll, address + _CLOCK)
    a.count = 0
    a.last, a.before = nanoseconds(address + _CLOCK), busy(a.poll)


@njit(inline="never")
def look(address):  # type: ignore[no-untyped-def]
    """Looks for a task between two parts."""
    a = carray(pointer_at(address), 1, _LOOK)[0]
    now, others = nanoseconds(address + _CLOCK), busy(a.poll)
    if a.count < a.most:
        carray(pointer_at(a.pieces), a.most, np.int64)[a.count] = now - a.last - (others - a.before)
        a.count += 1
    a.last, a.before = now, others
    look_for_task(a.poll)


@njit(inline="never")
def finish(address):  # type: ignore[no-untyped-def]
    """Ends a step."""
    leave(carray(pointer_at(address), 1, _LOOK)[0].poll, address + _CLOCK)


@njit(inline="never")
def look_when_due(address, taken, items, parts):  # type: ignore[no-untyped-def]
    """Looks after `taken` of `items`, but for the last, if one of `parts` parts has ended with it. Nobody
    looks after 0 parts."""
    if taken < items and taken * parts // items != (taken - 1) * parts // items:
        look(address)


class WatchArguments(ctypes.Structure):
    """The arguments of the thread that watches. clock: 16 bytes of its own; limit: of one sleep, a timespec;
    nanoseconds: of it all."""

    _fields_ = [(name, ctypes.c_int64) for name in ("poll", "clock", "limit", "nanoseconds")]


@njit(inline="never")
def _rest(address, limit):  # type: ignore[no-untyped-def]
    """Sleeps until a task comes. While a forward looks for tasks nobody is to be woken for them; it says when
    it does no more."""
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
    """Serves tasks until the time is over, the borrower has left, or the loan has ended."""
    a = carray(pointer, 1)[0]
    p = carray(pointer_at(a.poll), 1, _POLL)[0]
    due = nanoseconds(a.clock) + a.nanoseconds
    while nanoseconds(a.clock) < due and p.closed == 0 and acquire(p.left) == 0:
        _rest(a.poll, a.limit)
        if observe(a.poll + _WORKING) == 0:
            look_for_task(a.poll)
