"""The kernel of decode attention over paged KV on a CPU."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from kvloom.kernels.cpu.elementwise import FLOAT, INT, check_pages, copy_row, norm_row, rotate_row
from kvloom.kernels.cpu.memory import (
    LINE,
    address_of,
    aligned,
    fetch_add,
    pointer_at,
    prefetch,
    read,
    read_int,
    write,
)
from kvloom.kernels.cpu.parallel import kernel
from kvloom.kernels.cpu.vector import (
    LANES,
    add,
    exponential,
    first,
    largest,
    load,
    maximum,
    multiply,
    multiply_add,
    splat,
    store,
    store_totals,
    subtract,
    tanh,
    total,
)
from kvloom.kernels.reference import check

TILE = 64  # tokens whose scores are held at once; a multiple of LANES
LOWEST = -3e38
_AHEAD = 8  # rows of k; past its end comes v


@njit(inline="never")
def score(scores, q, q_head, k, count, group, dim):  # type: ignore[no-untyped-def]
    """Scores [group, TILE] of q [group, D] against k [count, D]; four tokens share a load of q."""
    row, whole = dim * 4, dim // LANES * LANES * 4
    for t in range(0, count - 3, 4):
        k0 = k + t * row
        k1, k2, k3 = k0 + row, k0 + 2 * row, k0 + 3 * row
        for i in range(0, 4 * row, LINE):
            prefetch(k0 + _AHEAD * row + i)
        for g in range(group):
            x, at = q + g * q_head, scores + (g * TILE + t) * 4
            s0 = s1 = s2 = s3 = splat(0.0)
            for i in range(0, whole, LANES * 4):
                lanes = load(x + i)
                s0 = multiply_add(lanes, load(k0 + i), s0)
                s1 = multiply_add(lanes, load(k1 + i), s1)
                s2 = multiply_add(lanes, load(k2 + i), s2)
                s3 = multiply_add(lanes, load(k3 + i), s3)
            store_totals(at, s0, s1, s2, s3)
            for i in range(whole, row, 4):
                for j in range(4):
                    write(at + j * 4, read(at + j * 4) + read(x + i) * read(k0 + j * row + i))
    for t in range(count // 4 * 4, count):
        for g in range(group):
            x, y = q + g * q_head, k + t * row
            s0 = splat(0.0)
            for i in range(0, whole, LANES * 4):
                s0 = multiply_add(load(x + i), load(y + i), s0)
            s = total(s0)
            for i in range(whole, row, 4):
                s += read(x + i) * read(y + i)
            write(scores + (g * TILE + t) * 4, s)


@njit(inline="never")
def weigh(scores, best, norm, sums, count, dim, scale, softcap):  # type: ignore[no-untyped-def]
    """Turns one head's scores into weights exp(s - best), and brings norm and sums [D] to the new best."""
    padded = (count + LANES - 1) // LANES * LANES * 4
    for i in range(0, padded, LANES * 4):
        s = multiply(load(scores + i), splat(scale))
        if softcap > 0:
            s = multiply(tanh(multiply(s, splat(1 / softcap))), splat(softcap))
        store(scores + i, s)
    for i in range(count * 4, padded, 4):
        write(scores + i, LOWEST)
    top = load(scores)
    for i in range(LANES * 4, padded, LANES * 4):
        top = maximum(top, load(scores + i))
    old = read(best)
    new = max(old, largest(top))
    weights = splat(0.0)
    for i in range(0, padded, LANES * 4):
        p = exponential(subtract(load(scores + i), splat(new)))
        store(scores + i, p)
        weights = add(weights, p)
    if new > old:
        shrink = exponential(splat(old - new))
        row, whole = dim * 4, dim // LANES * LANES * 4
        for i in range(0, whole, LANES * 4):
            store(sums + i, multiply(shrink, load(sums + i)))
        for i in range(whole, row, 4):
            write(sums + i, first(shrink) * read(sums + i))
        write(norm, read(norm) * first(shrink))
        write(best, new)
    write(norm, read(norm) + total(weights))


@njit(inline="never")
def accumulate(sums, weights, v, count, group, dim):  # type: ignore[no-untyped-def]
    """Adds weights [group, TILE] times v [count, D] to sums [group, D]; four tokens share a load of a sum."""
    row, whole = dim * 4, dim // LANES * LANES * 4
    for t in range(0, count - 3, 4):
        v0 = v + t * row
        v1, v2, v3 = v0 + row, v0 + 2 * row, v0 + 3 * row
        for g in range(group):
            at, y = weights + (g * TILE + t) * 4, sums + g * row
            p0, p1, p2, p3 = splat(read(at)), splat(read(at + 4)), splat(read(at + 8)), splat(read(at + 12))
            for i in range(0, whole, LANES * 4):
                s = multiply_add(p0, load(v0 + i), load(y + i))
                s = multiply_add(p1, load(v1 + i), s)
                s = multiply_add(p2, load(v2 + i), s)
                store(y + i, multiply_add(p3, load(v3 + i), s))
            for i in range(whole, row, 4):
                for j in range(4):
                    write(y + i, read(y + i) + read(at + j * 4) * read(v0 + j * row + i))
    for t in range(count // 4 * 4, count):
        for g in range(group):
            p, x, y = read(weights + (g * TILE + t) * 4), v + t * row, sums + g * row
            for i in range(0, whole, LANES * 4):
                store(y + i, multiply_add(splat(p), load(x + i), load(y + i)))
            for i in range(whole, row, 4):
                write(y + i, read(y + i) + p * read(x + i))


ALL = 1 << 60  # more tokens than there are
_NOBODY = -1


class AttentionArguments(ctypes.Structure):
    """The addresses, sizes, and strides in bytes; `next` is the work item to be taken next, `done` counts
    those that are. If k is not 0, an item begins with its new token: q and k are normalised (if q_norm is not
    0) and rotated in place, and k and v stored in the token's slot."""

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
    """Returns the address of K of a token, in the block of one KV head."""
    page = read_int(a.tables + b * a.table_row + position // a.page_tokens * 4)
    block = read_int(a.map + page * a.map_page + head * 4)
    return a.arena + block * a.block_bytes + position % a.page_tokens * a.head_dim * 4


@njit(inline="never")
def _open(a, item):  # type: ignore[no-untyped-def]
    """Returns an item: its sequence, heads from and to, tokens from and to."""
    b, first_head = item // a.spans, item % a.spans * a.span
    length = read_int(a.lengths + b * 4)
    start = max(0, length - a.window) if a.window > 0 else 0
    end_head = min(first_head + a.span, a.kv_heads)
    return b, first_head, end_head, start, length


@njit(inline="never")
def turn(a, b, first_head, end_head):  # type: ignore[no-untyped-def]
    """Normalises and rotates q and k of row b in these heads, in place."""
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
    """Brings the new token of sequence b into these heads: q and k are turned, k and v stored."""
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
    """Returns the tokens of all items."""
    tokens = 0
    for b in range(a.batch):
        length = read_int(a.lengths + b * 4)
        tokens += min(length, a.window) if a.window > 0 else length
    return tokens * a.spans


@njit(inline="never")
def room_of(a):  # type: ignore[no-untyped-def]
    """Returns the float32 values of scratch that `advance` needs, from a cache line's begin on."""
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
    """Brings `count` tokens from `position` on into what an item has so far."""
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
    """Readies this scratch for the first `advance`."""
    state = carray(pointer_at(place), 3, np.int64)
    state[0], state[1], state[2] = _NOBODY, 0, 0


@njit(inline="never")
def advance(a, counters, place, until):  # type: ignore[no-untyped-def]
    """Computes the online softmax, a tile of tokens at a time; an item is a span of KV heads of a sequence.
    `counters` is the address of a's `next` and `done`. It goes on until this thread has done `until` tokens
    in all its items together, and returns whether there may be more. It may return between two tiles of an
    item, and goes on there the next time: the sums are the same, wherever it has returned.

    Heads go inside tiles, for the blocks of a page are likelier neighbours in memory than those of a head.
    Scratch, at `place`, is the item, its next token, and the tokens done; then scores [group, TILE] and, for
    each head, sums [group, D] of V weighted by exp(score - best), best [group] and norm [group]. Fetching a
    few rows ahead is better than fetching the whole next block (34 against 29 GB/s on Zen 4), for which the
    memory's own prefetchers no longer help.
    """
    state = carray(pointer_at(place), 3, np.int64)
    scores = place + LINE
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
    """Attends for all items that nobody has taken."""
    scratch = np.empty(room_of(a) + LANES, np.float32)
    place = aligned(scratch)
    begin(place)
    advance(a, counters, place, ALL)
    scratch[0] = 0  # see `aligned`


@kernel(AttentionArguments)
def attend_all(pointer):  # type: ignore[no-untyped-def]
    attend(carray(pointer, 1)[0], address_of(pointer))


def span_of(batch: int, kv_heads: int, threads: int) -> int:
    """Returns the KV heads of an item: some items a thread, so that lengths even out."""
    return kv_heads if threads == 1 else min(kv_heads, max(1, batch * kv_heads // (threads * 16)))


def decode_attention(
    out: Tensor,
    q: Tensor,
    arena: Tensor,
    page_map: Tensor,
    layer: int,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Attends with one new token per sequence, q [B, heads, D], to its lengths[b] tokens, itself included.

    arena [blocks, 2, T, D] (see block_view), q and out are float32; page_map [pages, layers, kv_heads],
    tables [B, pages of the longest] and lengths [B] are int32. A window n > 0 hides all but the last n; a
    softcap c > 0 bends scores s to c tanh(s / c). Rows of q and out may lie anywhere; out may be q itself.
    Lengths are 1 or more. The kernel runs on as many threads as torch has for the calling one.
    """
    batch, heads, head_dim = q.shape
    kv_heads = check_pages(arena, page_map, layer, head_dim)
    layers = page_map.shape[1]
    check("q", q, batch, heads, head_dim, dtypes=FLOAT)
    check("out", out, batch, heads, head_dim, dtypes=FLOAT)
    check("tables", tables, batch, tables.shape[-1], dtypes=INT)
    check("lengths", lengths, batch, dtypes=INT)
    if heads % kv_heads:
        raise ValueError(f"q: want a multiple of {kv_heads} heads, got {heads}")
    out_row, out_head, _ = out.stride()
    q_row, q_head, _ = q.stride()
    threads = torch.get_num_threads()
    span = span_of(batch, kv_heads, threads)
    arguments = AttentionArguments(
        0, 0, out.data_ptr(), out_row * 4, out_head * 4, q.data_ptr(), q_row * 4, q_head * 4,
        arena.data_ptr(), arena.stride(0) * 4, arena.shape[2], head_dim,
        page_map.data_ptr() + layer * kv_heads * 4, layers * kv_heads * 4,
        tables.data_ptr(), tables.stride(0) * 4, lengths.data_ptr(),
        batch, kv_heads, heads // kv_heads, window, span, -(-kv_heads // span), scale, softcap,
    )  # fmt: skip
    attend_all(arguments, threads)
