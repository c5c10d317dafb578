"""Decode attention over paged KV on a CPU."""

import ctypes

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from kvloom.kernels.parallel import kernel
from kvloom.kernels.vector import (
    LANES,
    add,
    address_of,
    exponential,
    fetch_add,
    first,
    largest,
    load,
    maximum,
    multiply,
    multiply_add,
    prefetch,
    read,
    read_int,
    splat,
    store,
    store_totals,
    subtract,
    tanh,
    total,
    write,
)

_TILE = 64  # tokens whose scores are held at once; a multiple of LANES
_LOWEST = -3e38
_LINE = 64


class _Arguments(ctypes.Structure):
    """Addresses, sizes, and strides in bytes; `next` is the work item to be taken next."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("next", "out", "out_row", "out_head", "q", "q_row", "q_head")),
        *((name, ctypes.c_int64) for name in ("arena", "block_bytes", "page_tokens", "head_dim")),
        *((name, ctypes.c_int64) for name in ("map", "map_page", "tables", "table_row", "lengths")),
        *((name, ctypes.c_int64) for name in ("batch", "kv_heads", "group", "window", "span", "spans")),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
    ]


@njit(inline="never")
def _score(scores, q, q_head, k, count, group, dim, soon):  # type: ignore[no-untyped-def]
    """Scores [group, TILE] of q [group, D] against k [count, D]; four tokens share a load of q."""
    row, whole = dim * 4, dim // LANES * LANES * 4
    for t in range(0, count - 3, 4):
        k0 = k + t * row
        k1, k2, k3 = k0 + row, k0 + 2 * row, k0 + 3 * row
        for i in range(0, 4 * row, _LINE):
            prefetch(soon + t * row + i)
        for g in range(group):
            x, at = q + g * q_head, scores + (g * _TILE + t) * 4
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
            write(scores + (g * _TILE + t) * 4, s)


@njit(inline="never")
def _weigh(scores, best, norm, sums, count, dim, scale, softcap):  # type: ignore[no-untyped-def]
    """Turn one head's scores into weights exp(s - best), and bring norm and sums [D] to the new best."""
    padded = (count + LANES - 1) // LANES * LANES * 4
    for i in range(0, padded, LANES * 4):
        s = multiply(load(scores + i), splat(scale))
        if softcap > 0:
            s = multiply(tanh(multiply(s, splat(1 / softcap))), splat(softcap))
        store(scores + i, s)
    for i in range(count * 4, padded, 4):
        write(scores + i, _LOWEST)
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
def _accumulate(sums, weights, v, count, group, dim, soon):  # type: ignore[no-untyped-def]
    """Add weights [group, TILE] times v [count, D] to sums [group, D]; four tokens share a load of a sum."""
    row, whole = dim * 4, dim // LANES * LANES * 4
    for t in range(0, count - 3, 4):
        v0 = v + t * row
        v1, v2, v3 = v0 + row, v0 + 2 * row, v0 + 3 * row
        for i in range(0, 4 * row, _LINE):
            prefetch(soon + t * row + i)
        for g in range(group):
            at, y = weights + (g * _TILE + t) * 4, sums + g * row
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
            p, x, y = read(weights + (g * _TILE + t) * 4), v + t * row, sums + g * row
            for i in range(0, whole, LANES * 4):
                store(y + i, multiply_add(splat(p), load(x + i), load(y + i)))
            for i in range(whole, row, 4):
                write(y + i, read(y + i) + p * read(x + i))


@njit(inline="always")
def _start(length, window):  # type: ignore[no-untyped-def]
    return max(0, length - window) if window > 0 else 0


@njit(inline="never")
def _locate(a, b, head, position):  # type: ignore[no-untyped-def]
    """The address of K of a token, in the block of one KV head."""
    page = read_int(a.tables + b * a.table_row + position // a.page_tokens * 4)
    block = read_int(a.map + page * a.map_page + head * 4)
    return a.arena + block * a.block_bytes + position % a.page_tokens * a.head_dim * 4


@njit(inline="never")
def _open(a, item):  # type: ignore[no-untyped-def]
    """An item: its sequence, heads from and to, tokens from and to, and where it starts reading."""
    if item >= a.batch * a.spans:
        return 0, 0, 0, 0, 0, a.arena
    b, first_head = item // a.spans, item % a.spans * a.span
    length = read_int(a.lengths + b * 4)
    start = max(0, length - a.window) if a.window > 0 else 0
    end_head = min(first_head + a.span, a.kv_heads)
    return b, first_head, end_head, start, length, _locate(a, b, first_head, start)


@kernel(_Arguments)
def _attend(pointer):  # type: ignore[no-untyped-def]
    """Online softmax, a tile of tokens at a time; an item is a span of KV heads of a sequence.

    Heads go inside tiles, for the blocks of a page are likelier neighbours in memory than those of a head.
    Scratch is scores [group, TILE] and, for each head, sums [group, D] of V weighted by exp(score - best),
    best [group] and norm [group]. While one tile is worked on, the next is fetched: a thread's own loads keep
    only some 24 lines in flight, and few hardware prefetchers follow from block to block.
    """
    a = carray(pointer, 1)[0]
    group, row, scale, softcap = a.group, a.head_dim * 4, np.float32(a.scale), np.float32(a.softcap)
    to_v = a.page_tokens * row
    scratch = np.empty(group * (_TILE + a.span * (a.head_dim + 2)) + LANES, np.float32)
    scores = (scratch.ctypes.data + _LINE - 1) // _LINE * _LINE
    all_sums = scores + group * _TILE * 4
    all_best = all_sums + a.span * group * row
    all_norm = all_best + a.span * group * 4

    items = a.batch * a.spans
    item = fetch_add(address_of(pointer), 1)
    b, first_head, end_head, position, length, next_k = _open(a, item)
    while item < items:
        item = fetch_add(address_of(pointer), 1)
        coming = _open(a, item)
        for i in range(0, (end_head - first_head) * group * row, 4):
            write(all_sums + i, 0.0)
        for i in range(0, (end_head - first_head) * group * 4, 4):
            write(all_best + i, _LOWEST)
            write(all_norm + i, 0.0)

        while position < length:
            count = min(_TILE, a.page_tokens - position % a.page_tokens, length - position)
            for head in range(first_head, end_head):
                k = next_k
                if head + 1 < end_head:
                    next_k = _locate(a, b, head + 1, position)
                elif position + count < length:
                    next_k = _locate(a, b, first_head, position + count)
                else:
                    next_k = coming[5]
                rows = (head - first_head) * group
                q, sums = a.q + b * a.q_row + head * group * a.q_head, all_sums + rows * row
                best, norm = all_best + rows * 4, all_norm + rows * 4
                _score(scores, q, a.q_head, k, count, group, a.head_dim, next_k)
                for g in range(group):
                    at = scores + g * _TILE * 4
                    _weigh(at, best + g * 4, norm + g * 4, sums + g * row, count, a.head_dim, scale, softcap)
                _accumulate(sums, scores, k + to_v, count, group, a.head_dim, next_k + to_v)
            position += count

        for r in range((end_head - first_head) * group):
            at = a.out + b * a.out_row + (first_head * group + r) * a.out_head
            share = np.float32(1) / read(all_norm + r * 4)
            for i in range(0, row, 4):
                write(at + i, read(all_sums + r * row + i) * share)
        b, first_head, end_head, position, length, next_k = coming


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
    threads: int | None = None,
) -> None:
    """Attend with one new token per sequence, q [B, heads, D], to its lengths[b] tokens, itself included.

    arena [blocks, 2, T, D] (see block_view), q and out are float32; page_map [pages, layers, kv_heads],
    tables [B, pages of the longest] and lengths [B] are int32. A window n > 0 hides all but the last n;
    a softcap c > 0 bends scores s to c tanh(s / c). Rows of q and out may lie anywhere; out may be q itself.
    Lengths are 1 or more. Threads default to torch's number for the calling thread.
    """
    batch, heads, head_dim = q.shape
    _, two, page_tokens, arena_dim = arena.shape
    _, layers, kv_heads = page_map.shape
    if not (out.dtype is q.dtype is arena.dtype is torch.float32):
        raise TypeError(f"out, q, arena: want float32, got {out.dtype}, {q.dtype}, {arena.dtype}")
    if not (tables.dtype is lengths.dtype is page_map.dtype is torch.int32):
        got = f"{tables.dtype}, {lengths.dtype}, {page_map.dtype}"
        raise TypeError(f"tables, lengths, page_map: want int32, got {got}")
    if (
        out.shape != q.shape
        or two != 2
        or arena_dim != head_dim
        or heads % kv_heads
        or not 0 <= layer < layers
    ):
        raise ValueError(
            f"out {tuple(out.shape)}, q {tuple(q.shape)}, arena {tuple(arena.shape)}, page_map "
            f"{tuple(page_map.shape)} and layer {layer} do not fit"
        )
    if len(tables) != batch or len(lengths) != batch:
        raise ValueError(f"tables, lengths: want {batch} sequences, got {len(tables)} and {len(lengths)}")
    out_row, out_head, out_last = out.stride()
    q_row, q_head, q_last = q.stride()
    table_row, table_last = tables.stride()
    if out_last != 1 or q_last != 1 or table_last != 1 or not page_map.is_contiguous():
        raise ValueError("out, q, tables: the last dimension must be contiguous; page_map all of it")
    threads = torch.get_num_threads() if threads is None else threads
    # some items a thread, so that lengths even out
    span = kv_heads if threads == 1 else min(kv_heads, max(1, batch * kv_heads // (threads * 16)))
    arguments = _Arguments(
        0, out.data_ptr(), out_row * 4, out_head * 4, q.data_ptr(), q_row * 4, q_head * 4,
        arena.data_ptr(), arena.stride(0) * 4, page_tokens, head_dim,
        page_map.data_ptr() + layer * kv_heads * 4, layers * kv_heads * 4,
        tables.data_ptr(), table_row * 4, lengths.data_ptr(),
        batch, kv_heads, heads // kv_heads, window, span, -(-kv_heads // span), scale, softcap,
    )  # fmt: skip
    _attend(arguments, threads)
