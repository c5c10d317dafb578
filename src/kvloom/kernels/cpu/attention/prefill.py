"""The kernel of prompts' attention over paged KV on a CPU.

FlashAttention's tiles (Dao et al. 2022, algorithm 1; with the queries in the outer loop, as in
FlashAttention-2, Dao 2023, section 3.1): an item is a tile of neighbouring queries of one sequence in one KV
head, for which the tiles of its keys pass by, straight from the pages. Keys that no query of an item sees are
not read, and queries that see none of a tile's keys are left out of it. Tiles of keys lie at multiples of
their size in the sequence, so what a query gets does not depend, to the bit, on the chunk in which it comes,
but that a token that comes alone is a decode step's.
"""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from kvloom.kernels.cpu.attention.checks import check_attention, terms_of
from kvloom.kernels.cpu.attention.tile import LOWEST
from kvloom.kernels.cpu.attention.wide import (
    KEY_ROW,
    KEYS,
    SCORE_ROW,
    clear,
    load_tile,
    prefetch_tile,
    put_sinks,
    score_tile,
    slope_of,
    sum_tile,
    weigh_tile,
)
from kvloom.kernels.cpu.elementwise import INT, copy_row
from kvloom.kernels.cpu.kv_rows import KINDS
from kvloom.kernels.cpu.lanes.floats import LANES
from kvloom.kernels.cpu.memory import address_of, aligned, fetch_add, read, read_int, write
from kvloom.kernels.cpu.parallel import kernel
from kvloom.kernels.reference import check
from kvloom.types.geometry import I32, I64

_QUERIES: Final = 96  # of a tile in all heads of a group, if that is not larger: a multiple of six


class PrefillArguments(ctypes.Structure):
    """The addresses, sizes, and strides in bytes. items [item_count, 4]: sequence, first row of q, rows, and
    the position of the first in the sequence. sinks and slopes are as in AttentionArguments."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("next", "out", "out_row", "out_head", "q", "q_row", "q_head")),
        *((name, ctypes.c_int64) for name in ("arena", "block_bytes", "page_tokens", "head_dim")),
        *((name, ctypes.c_int64) for name in ("row_bytes", "kind")),
        *((name, ctypes.c_int64) for name in ("map", "map_page", "tables", "table_row")),
        *((name, ctypes.c_int64) for name in ("items", "item_count", "rows", "kv_heads", "group", "window")),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
        *((name, ctypes.c_int64) for name in ("sinks", "slopes")),
    ]


@njit(inline="never")
def _room(a):  # type: ignore[no-untyped-def]
    """Returns the float32 values of scratch that an item needs."""
    queries = a.rows * a.group
    return queries * (2 * a.head_dim + KEYS + 2) + (KEY_ROW // 4 + KEYS) * a.head_dim


@njit(inline="never")
def _copy_queries(a, first, rows, head, to):  # type: ignore[no-untyped-def]
    """Copies the queries of an item side by side, those of a position together."""
    size = a.head_dim * 4
    for i in range(rows * a.group):
        q = a.q + (first + i // a.group) * a.q_row + (head * a.group + i % a.group) * a.q_head
        copy_row(to + i * size, q, size)


@njit(inline="never")
def _put(a, first, rows, head, sums, norm):  # type: ignore[no-untyped-def]
    """Stores the output of an item."""
    size = a.head_dim * 4
    for i in range(rows * a.group):
        at = a.out + (first + i // a.group) * a.out_row + (head * a.group + i % a.group) * a.out_head
        share = np.float32(1) / read(norm + i * 4)
        for j in range(0, size, 4):
            write(at + j, read(sums + i * size + j) * share)


@njit(inline="never")
def _attend(a, item, head, place):  # type: ignore[no-untyped-def]
    """Attends from the queries of an item in one KV head. place: the address of scratch."""
    at = a.items + item * 16
    b, first, rows, start = read_int(at), read_int(at + 4), read_int(at + 8), read_int(at + 12)
    group, dim, scale, softcap = a.group, a.head_dim, np.float32(a.scale), np.float32(a.softcap)
    queries, size = rows * group, dim * 4
    keys = place
    values = keys + dim * KEY_ROW
    scores = values + KEYS * size
    q = scores + queries * SCORE_ROW
    sums = q + queries * size
    best = sums + queries * size
    norm = best + queries * 4
    _copy_queries(a, first, rows, head, q)
    clear(sums, best, norm, queries, dim, LOWEST)
    put_sinks(a, best, norm, queries, head, head + 1)
    end, begin = start + rows, max(0, start - a.window + 1) if a.window > 0 else 0
    for position in range(begin // KEYS * KEYS, end, KEYS):
        count = min(KEYS, end - position)
        load_tile(a, b, head, position, count, keys, values)
        low = max(0, position - start) * group  # the first query that sees a key of these, and past the last
        high = min(rows, position + count - 1 + a.window - start) * group if a.window > 0 else queries
        score_tile(scores + low * SCORE_ROW, q + low * size, high - low, keys, count, dim)
        for i in range(low, high):
            prefetch_tile(a, b, head, position + count, end, i - low, high - low)
            here = start + i // group - position
            sees = max(0, here - a.window + 1) if a.window > 0 else 0
            until, mine = min(count, here + 1), sums + i * size
            to, slope = scores + i * SCORE_ROW, slope_of(a, head * group + i % group)
            weigh_tile(
                to, best + i * 4, norm + i * 4, mine, sees, until, count, dim, scale, softcap, slope, -here
            )
        sum_tile(sums + low * size, scores + low * SCORE_ROW, high - low, values, count, dim)
    _put(a, first, rows, head, sums, norm)


@kernel(PrefillArguments)
def _prefill(pointer):  # type: ignore[no-untyped-def]
    a = carray(pointer, 1)[0]
    scratch = np.empty(_room(a) + LANES, np.float32)
    place, items = aligned(scratch), a.item_count * a.kv_heads
    item = fetch_add(address_of(pointer), 1)
    while item < items:
        _attend(a, item // a.kv_heads, item % a.kv_heads, place)
        item = fetch_add(address_of(pointer), 1)
    scratch[0] = 0  # see `aligned`


def _items(starts: I64, begins: I64, rows: int) -> I32:
    """Returns the items [I, 4], those with most keys first, so that no thread begins a long one at the
    end."""
    counts = np.diff(begins)
    tiles = -(-counts // rows)
    sequence = np.repeat(np.arange(len(counts)), tiles)
    place = (np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * rows
    position, taken = starts[sequence] + place, np.minimum(rows, counts[sequence] - place)
    items = np.stack((sequence, begins[sequence] + place, taken, position), 1)
    return items[np.argsort(-(position * taken), kind="stable")].astype(np.int32)


def prefill_attention(
    out: Tensor,
    q: Tensor,
    arena: Tensor,
    page_map: Tensor,
    layer: int,
    tables: Tensor,
    starts: Tensor,
    begins: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    *,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> None:
    """Computes causal attention of the new tokens of B sequences, packed: sequence b's queries are rows
    [begins[b], begins[b + 1]) of q [N, heads, D], at positions from starts[b] on. Their K and V are in the
    pool already.

    starts [B] and begins [B + 1] are int32; all else is as in `decode_attention`. Rows of q and out may lie
    anywhere; out may be q itself.
    """
    _, heads, head_dim = q.shape
    layers, batch = page_map.shape[1], len(starts)
    kv_heads = check_attention(out, q, arena, page_map, layer, tables, batch)
    check("starts", starts, batch, dtypes=INT)
    check("begins", begins, batch + 1, dtypes=INT)
    group = heads // kv_heads
    most = max(1, _QUERIES // group)
    items = _items(starts.numpy().astype(np.int64), begins.numpy().astype(np.int64), most)
    out_row, out_head, _ = out.stride()
    q_row, q_head, _ = q.stride()
    arguments = PrefillArguments(
        0, out.data_ptr(), out_row * 4, out_head * 4, q.data_ptr(), q_row * 4, q_head * 4,
        arena.data_ptr(), arena.stride(0) * arena.itemsize, arena.shape[2], head_dim,
        arena.shape[3] * arena.itemsize, KINDS[arena.dtype],
        page_map.data_ptr() + layer * kv_heads * 4, layers * kv_heads * 4,
        tables.data_ptr(), tables.stride(0) * 4, items.ctypes.data, len(items), most,
        kv_heads, group, window, scale, softcap, *terms_of(heads, sinks, slopes),
    )  # fmt: skip
    _prefill(arguments, min(torch.get_num_threads(), max(1, len(items) * kv_heads)))
