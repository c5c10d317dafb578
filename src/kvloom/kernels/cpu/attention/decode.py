"""The kernel of decode attention over paged KV on a CPU.

Pages that several rows share are read once for all of them (Microserving, section 3.4; the merge is that of
the online softmax, whose maximum and sum go on from the shared tokens to each row's own).
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from kvloom.kernels.cpu.attention.checks import check_attention, terms_of
from kvloom.kernels.cpu.attention.runs import END, MOST_QUERIES, RowRuns
from kvloom.kernels.cpu.attention.tile import LOWEST, TILE, accumulate_rows, rescale, score_rows, weigh
from kvloom.kernels.cpu.attention.wide import (
    KEY_ROW,
    clear,
    load_tile,
    locate,
    prefetch_tile,
    put_sinks,
    score_tile,
    slope_of,
    sum_tile,
    weigh_tile,
)
from kvloom.kernels.cpu.elementwise import INT, copy_row, norm_row, put_row, rotate_row
from kvloom.kernels.cpu.kv_rows import INT8, KINDS
from kvloom.kernels.cpu.lanes.floats import LANES
from kvloom.kernels.cpu.memory import LINE, address_of, aligned, fetch_add, pointer_at, read, read_int, write
from kvloom.kernels.cpu.parallel import kernel
from kvloom.kernels.reference import check

ALL = 1 << 60  # more tokens than there are
_NOBODY = -1


class AttentionArguments(ctypes.Structure):
    """The addresses, sizes, and strides in bytes; `next` is the work item to be taken next, `done` counts
    those that are. A row of K or V in a block has row_bytes, in the format `kind`. map: the block of the
    layer's first KV head in the page map; map_page: from one page to the next. group: query heads of a KV
    head. An item has `span` of the KV heads, and a row, or a run of rows, is `spans` items.

    If k is not 0, an item begins with its new token: q and k are normalised (if q_norm is not 0) and their
    first rotary_dim numbers rotated in place, and k and v stored in the token's slot. If order is not 0,
    items are of runs of rows (see `RowRuns`), else of rows. sinks and slopes have a number for each query
    head; 0 if there are none."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("next", "done", "out", "out_row", "out_head")),
        *((name, ctypes.c_int64) for name in ("q", "q_row", "q_head")),
        *((name, ctypes.c_int64) for name in ("arena", "block_bytes", "page_tokens", "head_dim")),
        *((name, ctypes.c_int64) for name in ("row_bytes", "kind")),
        *((name, ctypes.c_int64) for name in ("map", "map_page", "tables", "table_row", "lengths")),
        *((name, ctypes.c_int64) for name in ("batch", "kv_heads", "group", "window", "span", "spans")),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
        *((name, ctypes.c_int64) for name in ("k", "v", "slot_page", "slot_offset")),
        *((name, ctypes.c_int64) for name in ("cos", "sin", "rotary_dim", "rotary_row")),
        *((name, ctypes.c_int64) for name in ("q_norm", "k_norm")),
        *((name, ctypes.c_double) for name in ("eps", "offset")),
        *((name, ctypes.c_int64) for name in ("order", "runs", "run_count", "segments", "longest")),
        *((name, ctypes.c_int64) for name in ("sinks", "slopes")),
    ]


@njit(inline="never")
def items_of(a):  # type: ignore[no-untyped-def]
    """Returns the number of items."""
    return (a.batch if a.order == 0 else a.run_count) * a.spans


@njit(inline="always")
def _rows_of(a):  # type: ignore[no-untyped-def]
    """Returns the rows of an item at most."""
    return 1 if a.order == 0 else a.longest


@njit(inline="always")
def _heads_of(a, item):  # type: ignore[no-untyped-def]
    """Returns an item's heads: from and to."""
    first_head = item % a.spans * a.span
    return first_head, min(first_head + a.span, a.kv_heads)


@njit(inline="never")
def _run(a, item):  # type: ignore[no-untyped-def]
    """Returns an item's first row in `order`, its rows, its first segment, and the number of segments."""
    if a.order == 0:
        return item // a.spans, 1, 0, 1
    at = a.runs + item // a.spans * 16
    return read_int(at), read_int(at + 4), read_int(at + 8), read_int(at + 12)


@njit(inline="always")
def _row(a, i):  # type: ignore[no-untyped-def]
    return i if a.order == 0 else read_int(a.order + i * 4)


@njit(inline="always")
def _begin_of(a, b):  # type: ignore[no-untyped-def]
    """Returns the first token that row b sees."""
    return max(0, read_int(a.lengths + b * 4) - a.window) if a.window > 0 else 0


@njit(inline="never")
def _segment(a, first, segment):  # type: ignore[no-untyped-def]
    """Returns a segment: its first row in `order`, its rows, tokens from and to. first: the run's first row,
    which is the only one if nothing is shared."""
    rows, start, end = 1, 0, END
    if a.order != 0:
        at = a.segments + segment * 16
        first, rows, start, end = read_int(at), read_int(at + 4), read_int(at + 8), read_int(at + 12)
    begin = _begin_of(a, _row(a, first))
    for i in range(1, rows):
        begin = min(begin, _begin_of(a, _row(a, first + i)))
    return first, rows, max(start, begin), read_int(a.lengths + _row(a, first) * 4) if end == END else end


@njit(inline="never")
def rotate_heads(a, b, first_head, end_head):  # type: ignore[no-untyped-def]
    """Normalises and rotates q and k of row b in these heads, in place."""
    cos, sin = a.cos + b * a.rotary_row, a.sin + b * a.rotary_row
    for head in range(first_head, end_head):
        k = a.k + b * a.q_row + head * a.q_head
        for g in range(a.group):
            q = a.q + b * a.q_row + (head * a.group + g) * a.q_head
            if a.q_norm != 0:
                norm_row(q, q, a.q_norm, a.head_dim, a.eps, a.offset)
            rotate_row(q, cos, sin, a.rotary_dim)
        if a.k_norm != 0:
            norm_row(k, k, a.k_norm, a.head_dim, a.eps, a.offset)
        rotate_row(k, cos, sin, a.rotary_dim)


@njit(inline="never")
def _append(a, b, first_head, end_head):  # type: ignore[no-untyped-def]
    """Appends the new token of sequence b in these heads: q and k are rotated, k and v stored in the pool."""
    size = a.row_bytes
    rotate_heads(a, b, first_head, end_head)
    blocks = a.map + read_int(a.slot_page + b * 4) * a.map_page
    offset = read_int(a.slot_offset + b * 4) * size
    for head in range(first_head, end_head):
        k, v = a.k + b * a.q_row + head * a.q_head, a.v + b * a.q_row + head * a.q_head
        to = a.arena + read_int(blocks + head * 4) * a.block_bytes + offset
        put_row(to, k, a.head_dim, size, a.kind)
        put_row(to + a.page_tokens * size, v, a.head_dim, size, a.kind)


@njit(inline="never")
def tokens_of(a):  # type: ignore[no-untyped-def]
    """Returns the tokens of all items."""
    tokens = 0
    for b in range(a.batch):
        length = read_int(a.lengths + b * 4)
        tokens += min(length, a.window) if a.window > 0 else length
    return tokens * a.spans


@njit(inline="always")
def _queries_of(a):  # type: ignore[no-untyped-def]
    """Returns the queries of an item at most, in all its heads."""
    return a.span * _rows_of(a) * a.group


@njit(inline="never")
def room_of(a):  # type: ignore[no-untyped-def]
    """Returns the float32 values of scratch that `advance` needs, from a cache line's begin on."""
    own = TILE + a.group * TILE + _queries_of(a) * (a.head_dim + 2) + 2 * LANES
    if a.order == 0:
        return own
    return own + LANES + _rows_of(a) * a.group * (TILE + a.head_dim) + (KEY_ROW // 4 + TILE) * a.head_dim


@njit(inline="never")
def _attend_tile(a, b, heads, position, count, scores, found):  # type: ignore[no-untyped-def]
    """Attends from row b to `count` tokens from `position` on. found: what the row has found so far, by the
    addresses of its sums, best and norm; and the rows of its run, after which the next head's are."""
    all_sums, all_best, all_norm, run_rows = found
    group, size, scale, softcap = a.group, a.head_dim * 4, np.float32(a.scale), np.float32(a.softcap)
    row, kind, scales = a.row_bytes, a.kind, scores + group * TILE * 4
    ahead = position - read_int(a.lengths + b * 4) + 1
    for head in range(heads[0], heads[1]):
        k = locate(a, b, head, position)
        rows = (head - heads[0]) * run_rows * group
        q, sums = a.q + b * a.q_row + head * group * a.q_head, all_sums + rows * size
        best, norm = all_best + rows * 4, all_norm + rows * 4
        v = k + a.page_tokens * row
        score_rows(scores, q, a.q_head, k, row, kind, count, group, a.head_dim)
        if kind == INT8:
            rescale(scores, scales, k, row, count, group)
        for g in range(group):
            at, slope = scores + g * TILE * 4, slope_of(a, head * group + g)
            weigh(
                at, best + g * 4, norm + g * 4, sums + g * size, 0, count, a.head_dim, scale, softcap,
                slope, ahead,
            )  # fmt: skip
        if kind == INT8:
            rescale(scores, scales, v, row, count, group)
        accumulate_rows(sums, scores, v, row, kind, count, group, a.head_dim)


@njit(inline="never")
def _attend_shared_tile(a, first, rows, heads, position, count, end, place, found):  # type: ignore[no-untyped-def]
    """Does the same from rows order[first…], which have the tokens up to `end` in the same pages."""
    all_sums, all_best, all_norm, run_rows = found
    group, dim, scale, softcap = a.group, a.head_dim, np.float32(a.scale), np.float32(a.softcap)
    queries, one = rows * group, _row(a, first)
    scores = place
    packed = scores + queries * TILE * 4
    keys = packed + queries * dim * 4
    values = keys + dim * KEY_ROW
    for head in range(heads[0], heads[1]):
        at = (head - heads[0]) * run_rows * group
        for i in range(queries):
            q = a.q + _row(a, first + i // group) * a.q_row + (head * group + i % group) * a.q_head
            copy_row(packed + i * dim * 4, q, dim * 4)
        load_tile(a, one, head, position, count, keys, values)
        score_tile(scores, packed, queries, keys, count, dim)
        for i in range(queries):
            prefetch_tile(a, one, head, position + count, end, i, queries)
            b = _row(a, first + i // group)
            low, ahead = max(0, _begin_of(a, b) - position), position - read_int(a.lengths + b * 4) + 1
            mine, best, norm = all_sums + (at + i) * dim * 4, all_best + (at + i) * 4, all_norm + (at + i) * 4
            weigh_tile(
                scores + i * TILE * 4, best, norm, mine, low, count, count, dim, scale, softcap,
                slope_of(a, head * group + i % group), ahead,
            )  # fmt: skip
        sum_tile(all_sums + at * dim * 4, scores, queries, values, count, dim)


@njit(inline="never")
def _put(a, first, rows, first_head, end_head, sums, norm):  # type: ignore[no-untyped-def]
    """Stores the output of rows order[first…]."""
    row, group = a.head_dim * 4, a.group
    for i in range((end_head - first_head) * rows * group):
        head, b = first_head + i // (rows * group), _row(a, first + i % (rows * group) // group)
        at = a.out + b * a.out_row + (head * group + i % group) * a.out_head
        share = np.float32(1) / read(norm + i * 4)
        for j in range(0, row, 4):
            write(at + j, read(sums + i * row + j) * share)


@njit(inline="never")
def begin(place):  # type: ignore[no-untyped-def]
    """Readies this scratch for the first `advance`."""
    state = carray(pointer_at(place), 4, np.int64)
    state[0], state[1], state[2], state[3] = _NOBODY, 0, 0, 0


@njit(inline="never")
def advance(a, counters, place, until):  # type: ignore[no-untyped-def]
    """Computes the online softmax, a tile of tokens at a time; an item is a span of KV heads of a run of
    rows, or of a sequence. `counters` is the address of a's `next` and `done`. It goes on until this thread
    has done `until` tokens in all its items together, and returns whether there may be more. It may return
    between two tiles of an item, and goes on there the next time: the sums are the same, wherever it has
    returned.

    Heads go inside tiles, for the blocks of a page are likelier neighbours in memory than those of a head.
    Scratch, at `place`, is the item, its next segment and token, and the tokens done; then scores [group,
    TILE], scales [TILE] of a tile's rows and, for each head and row, sums [group, D] of V weighted by
    exp(score - best), best [group] and norm [group]; then what a tile of shared tokens takes. Fetching a few
    rows ahead is better than fetching the whole next block (34 against 29 GB/s on Zen 4), for which the
    memory's own prefetchers no longer help.
    """
    state = carray(pointer_at(place), 4, np.int64)
    scores = place + LINE
    sums = scores + (a.group + 1) * TILE * 4
    best = sums + _queries_of(a) * a.head_dim * 4
    norm = best + _queries_of(a) * 4
    wide = (norm + _queries_of(a) * 4 + LINE - 1) // LINE * LINE
    items, item, segment, position, tokens = items_of(a), state[0], state[1], state[2], state[3]
    fresh = item == _NOBODY
    if fresh:
        item = fetch_add(counters, 1)
    while item < items:
        heads = _heads_of(a, item)
        first_head, end_head = heads
        first, rows, segments, count = _run(a, item)
        if fresh:
            segment, position = 0, -1
            clear(sums, best, norm, (end_head - first_head) * rows * a.group, a.head_dim, LOWEST)
            put_sinks(a, best, norm, rows * a.group, first_head, end_head)
            if a.k != 0:
                for i in range(rows):
                    _append(a, _row(a, first + i), first_head, end_head)
        while segment < count and tokens < until:
            begins, together, start, end = _segment(a, first, segments + segment)
            position = max(position, start)
            at = (begins - first) * a.group
            found = sums + at * a.head_dim * 4, best + at * 4, norm + at * 4, rows
            while position < end and tokens < until:
                tile = min(TILE, end - position)
                if together == 1:
                    tile = min(tile, a.page_tokens - position % a.page_tokens)
                    _attend_tile(a, _row(a, begins), heads, position, tile, scores, found)
                else:
                    _attend_shared_tile(a, begins, together, heads, position, tile, end, wide, found)
                position += tile
                tokens += tile * together
            if position >= end:
                segment, position = segment + 1, -1
        if segment < count:
            state[0], state[1], state[2], state[3] = item, segment, position, tokens
            return True
        _put(a, first, rows, first_head, end_head, sums, norm)
        fetch_add(counters + 8, 1)
        if tokens >= until:
            state[0], state[3] = _NOBODY, tokens
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
    """Runs decode attention over all items."""
    attend(carray(pointer, 1)[0], address_of(pointer))


def span_of(batch: int, kv_heads: int, threads: int) -> int:
    """Returns the KV heads of an item: some items a thread, so that lengths even out."""
    return kv_heads if threads == 1 else min(kv_heads, max(1, batch * kv_heads // (threads * 16)))


def span_of_runs(runs: RowRuns, kv_heads: int, group: int, threads: int) -> int:
    """Returns the KV heads of an item of runs, whose sums are to stay in a core's cache."""
    return min(span_of(len(runs.runs), kv_heads, threads), max(1, MOST_QUERIES // (group * runs.longest)))


def addresses_of(runs: RowRuns) -> tuple[int, int, int, int, int]:
    """Returns the arguments that say what is shared: order, runs, run_count, segments, longest."""
    return (
        runs.order.ctypes.data, runs.runs.ctypes.data, len(runs.runs),
        runs.segments.ctypes.data, runs.longest,
    )  # fmt: skip


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
    runs: RowRuns | None = None,
    *,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> None:
    """Attends with one new token per sequence, q [B, heads, D], to its lengths[b] tokens, itself included.

    arena [blocks, 2, T, D] is float32, bfloat16 or int8 (see `check_pages`), q and out float32; page_map
    [pages, layers, kv_heads], tables [B, pages of the longest] and lengths [B] are int32. A window n > 0
    hides all but the last n; a softcap c > 0 bends scores s to c tanh(s / c). Rows of q and out may lie
    anywhere; out may be q itself. Lengths are 1 or more. runs: of rows that begin with the same
    pages, the last token of none among these. sinks and slopes [heads] are float32: a sink is the score of
    one more key, whose value is 0, and a score loses its head's slope for each token from the key's to the
    query's (ALiBi). The kernel runs on as many threads as torch has for the calling
    one.
    """
    batch, heads, head_dim = q.shape
    kv_heads, layers = check_attention(out, q, arena, page_map, layer, tables, batch), page_map.shape[1]
    check("lengths", lengths, batch, dtypes=INT)
    out_row, out_head, _ = out.stride()
    q_row, q_head, _ = q.stride()
    threads = torch.get_num_threads()
    span, shared = span_of(batch, kv_heads, threads), (0, 0, 0, 0, 0)
    if runs is not None:
        span, shared = span_of_runs(runs, kv_heads, heads // kv_heads, threads), addresses_of(runs)
    arguments = AttentionArguments(
        0, 0, out.data_ptr(), out_row * 4, out_head * 4, q.data_ptr(), q_row * 4, q_head * 4,
        arena.data_ptr(), arena.stride(0) * arena.itemsize, arena.shape[2], head_dim,
        arena.shape[3] * arena.itemsize, KINDS[arena.dtype],
        page_map.data_ptr() + layer * kv_heads * 4, layers * kv_heads * 4,
        tables.data_ptr(), tables.stride(0) * 4, lengths.data_ptr(),
        batch, kv_heads, heads // kv_heads, window, span, -(-kv_heads // span), scale, softcap,
        *[0] * 10, 0.0, 0.0, *shared, *terms_of(heads, sinks, slopes),
    )  # fmt: skip
    attend_all(arguments, threads)
