"""The kernel of decode attention over paged KV on a CPU."""

import ctypes

import numpy as np
from numba import carray, njit

from kvloom.kernels.attention_tile import LOWEST, TILE, accumulate, score, weigh
from kvloom.kernels.memory import address_of, fetch_add, pointer_at, read, read_int, write
from kvloom.kernels.parallel import kernel
from kvloom.kernels.rows import copy_row, norm_row, rotate_row
from kvloom.kernels.vector import LANES

_LINE = 64
ALL = 1 << 60  # more tokens than there are
_NOBODY = -1


class AttentionArguments(ctypes.Structure):
    """Addresses, sizes, and strides in bytes; `next` is the work item to be taken next, `done` counts those
    that are. Where k is not 0, an item begins with its new token: q and k are normalised (where q_norm is
    not 0) and rotated in place, and k and v stored in the token's slot."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("next", "done", "out", "out_row", "out_head")),
        *((name, ctypes.c_int64) for name in ("q", "q_row", "q_head")),
        *((name, ctypes.c_int64) for name in ("arena", "block_bytes", "page_tokens", "head_dim")),
        *((name, ctypes.c_int64) for name in ("map", "map_page", "tables", "table_row", "lengths")),
        *((name, ctypes.c_int64) for name in ("batch", "kv_heads", "group", "window", "span", "spans")),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
        *((name, ctypes.c_int64) for name in ("k", "v", "slot_page", "slot_offset")),
        *((name, ctypes.c_int64) for name in ("cos", "sin", "turned", "turn_row")),
        *((name, ctypes.c_int64) for name in ("q_norm", "k_norm")),
        *((name, ctypes.c_double) for name in ("eps", "offset")),
    ]


@njit(inline="never")
def _locate(a, b, head, position):  # type: ignore[no-untyped-def]
    """The address of K of a token, in the block of one KV head."""
    page = read_int(a.tables + b * a.table_row + position // a.page_tokens * 4)
    block = read_int(a.map + page * a.map_page + head * 4)
    return a.arena + block * a.block_bytes + position % a.page_tokens * a.head_dim * 4


@njit(inline="never")
def _open(a, item):  # type: ignore[no-untyped-def]
    """An item: its sequence, heads from and to, tokens from and to."""
    b, first_head = item // a.spans, item % a.spans * a.span
    length = read_int(a.lengths + b * 4)
    start = max(0, length - a.window) if a.window > 0 else 0
    end_head = min(first_head + a.span, a.kv_heads)
    return b, first_head, end_head, start, length


@njit(inline="never")
def turn(a, b, first_head, end_head):  # type: ignore[no-untyped-def]
    """Normalise and rotate q and k of row b in these heads, in place."""
    cos, sin = a.cos + b * a.turn_row, a.sin + b * a.turn_row
    for head in range(first_head, end_head):
        k = a.k + b * a.q_row + head * a.q_head
        for g in range(a.group):
            q = a.q + b * a.q_row + (head * a.group + g) * a.q_head
            if a.q_norm != 0:
                norm_row(q, q, a.q_norm, a.head_dim, a.eps, a.offset)
            rotate_row(q, cos, sin, a.turned)
        if a.k_norm != 0:
            norm_row(k, k, a.k_norm, a.head_dim, a.eps, a.offset)
        rotate_row(k, cos, sin, a.turned)


@njit(inline="never")
def _enter(a, b, first_head, end_head):  # type: ignore[no-untyped-def]
    """Bring the new token of sequence b into these heads: turn q and k, store k and v."""
    size = a.head_dim * 4
    turn(a, b, first_head, end_head)
    blocks = a.map + read_int(a.slot_page + b * 4) * a.map_page
    offset = read_int(a.slot_offset + b * 4) * size
    for head in range(first_head, end_head):
        k, v = a.k + b * a.q_row + head * a.q_head, a.v + b * a.q_row + head * a.q_head
        to = a.arena + read_int(blocks + head * 4) * a.block_bytes + offset
        copy_row(to, k, size)
        copy_row(to + a.page_tokens * size, v, size)


@njit(inline="never")
def tokens_of(a):  # type: ignore[no-untyped-def]
    """Over all items."""
    tokens = 0
    for b in range(a.batch):
        length = read_int(a.lengths + b * 4)
        tokens += min(length, a.window) if a.window > 0 else length
    return tokens * a.spans


@njit(inline="never")
def room_of(a):  # type: ignore[no-untyped-def]
    """float32 values of scratch that `advance` needs, from a cache line's begin on."""
    return a.group * (TILE + a.span * (a.head_dim + 2)) + 2 * LANES


@njit(inline="never")
def _clear(a, heads, sums, best, norm):  # type: ignore[no-untyped-def]
    rows = heads * a.group * 4
    for i in range(0, rows * a.head_dim, 4):
        write(sums + i, 0.0)
    for i in range(0, rows, 4):
        write(best + i, LOWEST)
        write(norm + i, 0.0)


@njit(inline="never")
def _tile(a, b, first_head, end_head, position, count, scores, all_sums):  # type: ignore[no-untyped-def]
    """Bring `count` tokens from `position` on into what an item has so far."""
    group, row, scale, softcap = a.group, a.head_dim * 4, np.float32(a.scale), np.float32(a.softcap)
    all_best = all_sums + a.span * group * row
    all_norm = all_best + a.span * group * 4
    for head in range(first_head, end_head):
        k = _locate(a, b, head, position)
        rows = (head - first_head) * group
        q, sums = a.q + b * a.q_row + head * group * a.q_head, all_sums + rows * row
        best, norm = all_best + rows * 4, all_norm + rows * 4
        score(scores, q, a.q_head, k, count, group, a.head_dim)
        for g in range(group):
            at = scores + g * TILE * 4
            weigh(at, best + g * 4, norm + g * 4, sums + g * row, count, a.head_dim, scale, softcap)
        accumulate(sums, scores, k + a.page_tokens * row, count, group, a.head_dim)


@njit(inline="never")
def _put(a, b, first_head, end_head, sums, norm):  # type: ignore[no-untyped-def]
    row = a.head_dim * 4
    for r in range((end_head - first_head) * a.group):
        at = a.out + b * a.out_row + (first_head * a.group + r) * a.out_head
        share = np.float32(1) / read(norm + r * 4)
        for i in range(0, row, 4):
            write(at + i, read(sums + r * row + i) * share)


@njit(inline="never")
def begin(place):  # type: ignore[no-untyped-def]
    """Before the first `advance` over this scratch."""
    state = carray(pointer_at(place), 3, np.int64)
    state[0], state[1], state[2] = _NOBODY, 0, 0


@njit(inline="never")
def advance(a, counters, place, until):  # type: ignore[no-untyped-def]
    """Online softmax, a tile of tokens at a time; an item is a span of KV heads of a sequence. `counters` is
    the address of a's `next` and `done`. Goes on until this thread has done `until` tokens in all its items
    together, and returns whether there may be more. It may return between two tiles of an item, and goes on
    there the next time: the sums are the same, wherever it has returned.

    Heads go inside tiles, for the blocks of a page are likelier neighbours in memory than those of a head.
    Scratch, at `place`, is the item, its next token, and the tokens done; then scores [group, TILE] and, for
    each head, sums [group, D] of V weighted by exp(score - best), best [group] and norm [group]. Fetching a
    few rows ahead is better than fetching the whole next block (34 against 29 GB/s on Zen 4), where the
    memory's own prefetchers no longer help.
    """
    state = carray(pointer_at(place), 3, np.int64)
    scores = place + _LINE
    sums = scores + a.group * TILE * 4
    best = sums + a.span * a.group * a.head_dim * 4
    norm = best + a.span * a.group * 4
    items, item, position, tokens = a.batch * a.spans, state[0], state[1], state[2]
    fresh = item == _NOBODY
    if fresh:
        item = fetch_add(counters, 1)
    while item < items:
        b, first_head, end_head, start, length = _open(a, item)
        if fresh:
            position = start
            _clear(a, end_head - first_head, sums, best, norm)
            if a.k != 0:
                _enter(a, b, first_head, end_head)
        while position < length and tokens < until:
            count = min(TILE, a.page_tokens - position % a.page_tokens, length - position)
            _tile(a, b, first_head, end_head, position, count, scores, sums)
            position += count
            tokens += count
        if position < length:
            state[0], state[1], state[2] = item, position, tokens
            return True
        _put(a, b, first_head, end_head, sums, norm)
        fetch_add(counters + 8, 1)
        if tokens >= until:
            state[0], state[2] = _NOBODY, tokens
            return True
        fresh = True
        item = fetch_add(counters, 1)
    return False


@njit(inline="never")
def attend(a, counters):  # type: ignore[no-untyped-def]
    """All items that nobody has taken."""
    scratch = np.empty(room_of(a) + LANES, np.float32)
    place = (scratch.ctypes.data + _LINE - 1) // _LINE * _LINE
    begin(place)
    advance(a, counters, place, ALL)
    scratch[0] = 0  # numba frees an array after its last use, and addresses are none


@kernel(AttentionArguments)
def attend_all(pointer):  # type: ignore[no-untyped-def]
    attend(carray(pointer, 1)[0], address_of(pointer))


def span_of(batch: int, kv_heads: int, threads: int) -> int:
    """KV heads an item: some items a thread, so that lengths even out."""
    return kv_heads if threads == 1 else min(kv_heads, max(1, batch * kv_heads // (threads * 16)))
