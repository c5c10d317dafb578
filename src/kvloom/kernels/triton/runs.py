"""A run of a row of a task: what one program does of it, in the lender's arena (Weaver, section 4.1).

Nothing that the borrower writes is believed. It may change between two looks, and a compiler may load a value
twice: so every id is clamped to what is lent on its way into an address, whatever else is decided about it.

Where a task has few rows, long ones are cut into runs of tokens, each a part (split KV, as Flash-Decoding
does it): whoever ends the last run of a row and a KV head puts their sums together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvloom.kernels.triton.poll import look
from kvloom.kernels.triton.tile import LOWEST, attend_tokens


@triton.jit
def _block(  # type: ignore[no-untyped-def]
    mapped, lent, page, layer, kv_head, valid, PAGES: tl.constexpr, LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr, LENT: tl.constexpr,
):  # fmt: skip
    """→ own blocks of pages as the borrower counts them, lent ones in any case; and whether they were
    named."""
    inside = tl.minimum(tl.maximum(page, 0), PAGES - 1).to(tl.int64)
    named = tl.load(mapped + (inside * LAYERS + layer) * KV_HEADS + kv_head, mask=valid, other=0)
    block = tl.load(lent + tl.minimum(tl.maximum(named, 0), LENT - 1), mask=valid, other=0)
    return block.to(tl.int64), (page >= 0) & (page < PAGES) & (named >= 0) & (named < LENT)


@triton.jit
def cut(length, window, runs, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """→ the first token of a row that counts, tokens of each run, and how many runs there are."""
    start = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    each = tl.cdiv(tl.cdiv(length - start, runs), SPAN) * SPAN
    return start, each, tl.cdiv(length - start, each)


@triton.jit
def _append(  # type: ignore[no-untyped-def]
    qkv, arena, table, mapped, lent, layer, position, kv_head, arena_block, PAGES: tl.constexpr,
    LAYERS: tl.constexpr, LENT: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """K and V of one KV head. → whether the page was lent; where not, nothing is written."""
    dims = tl.arange(0, DIMS)
    kind = arena.dtype.element_ty
    inside = dims < HEAD_DIM
    page = look(table + position // PAGE_TOKENS)
    block, good = _block(mapped, lent, page, layer, kv_head, True, PAGES, LAYERS, KV_HEADS, LENT)
    to = arena + block * arena_block + position % PAGE_TOKENS * HEAD_DIM + dims
    new = qkv + (KV_HEADS * GROUP + kv_head) * HEAD_DIM + dims
    tl.store(to, tl.load(new, mask=inside).to(kind), mask=inside & good)
    new += KV_HEADS * HEAD_DIM
    tl.store(to + PAGE_TOKENS * HEAD_DIM, tl.load(new, mask=inside).to(kind), mask=inside & good)
    tl.debug_barrier()  # other threads read it
    return good


@triton.jit
def _together(sums, scales, first, count, ROWS: tl.constexpr, DIMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums and norms of `count` parts from `first` on, as if they were one's."""
    row = tl.arange(0, ROWS)
    places = row[:, None] * DIMS + tl.arange(0, DIMS)[None, :]
    total = tl.zeros([ROWS, DIMS], tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    best = tl.full([ROWS], LOWEST, tl.float32)
    for part in range(first, first + count):
        scale = scales + part * 2 * ROWS + row
        other = tl.load(scale + ROWS, cache_modifier=".cg")  # others wrote it, past this one's nearest cache
        top = tl.maximum(best, other)
        old, new = tl.exp2(best - top), tl.exp2(other - top)
        norm = norm * old + tl.load(scale, cache_modifier=".cg") * new
        more = tl.load(sums + part * ROWS * DIMS + places, cache_modifier=".cg")
        total = total * old[:, None] + more * new[:, None]
        best = top
    return total, norm


@triton.jit
def serve_run(  # type: ignore[no-untyped-def]
    out, qkv, arena, table, mapped, lent, counts, partial, scales, layer, length, start, each, count, run,
    pair, first_part, scale, bound, arena_block, PAGES: tl.constexpr, LAYERS: tl.constexpr,
    LENT: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with the queries of one KV head to one of its row's runs; the last appends before. → whether all
    pages were lent; where not, the output means nothing."""
    dims, row = tl.arange(0, DIMS), tl.arange(0, ROWS)
    kind = arena.dtype.element_ty
    inside = dims < HEAD_DIM
    kv_head = (pair % KV_HEADS).to(tl.int32)
    good = kv_head >= 0
    if run == count - 1:
        good = _append(
            qkv, arena, table, mapped, lent, layer, length - 1, kv_head, arena_block,
            PAGES, LAYERS, LENT, KV_HEADS, GROUP, PAGE_TOKENS, HEAD_DIM, DIMS,
        )  # fmt: skip

    heads = kv_head * GROUP + row
    valid = (row < GROUP)[:, None] & inside[None, :]
    places = (heads * HEAD_DIM)[:, None] + dims[None, :]
    q = tl.load(qkv + places, mask=valid, other=0.0).to(kind)
    query = tl.zeros([ROWS], tl.int32) + length
    sums = tl.zeros([ROWS, DIMS], tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    best = tl.full([ROWS], LOWEST, tl.float32)
    wrong = tl.zeros([TILE], tl.int32)
    begin = start + run * each
    end = tl.minimum(begin + each, length)
    for first in range(begin, end, TILE):
        positions = first + tl.arange(0, TILE)
        there = positions < end
        pages = tl.load(table + positions // PAGE_TOKENS, mask=there, other=0)
        blocks, named = _block(mapped, lent, pages, layer, kv_head, there, PAGES, LAYERS, KV_HEADS, LENT)
        wrong += (there & (named == 0)).to(tl.int32)
        rows = blocks * arena_block + positions % PAGE_TOKENS * HEAD_DIM
        sums, norm, best = attend_tokens(
            sums, norm, best, q, query, positions, rows, there, arena, scale, bound, 0,
            PAGE_TOKENS, HEAD_DIM, DIMS, True, False, True, PRECISION,
        )  # fmt: skip
    good = good & (tl.sum(wrong, 0) == 0)
    whole = count == 1
    if count > 1:
        part = first_part + run
        tl.store(partial + part * ROWS * DIMS + row[:, None] * DIMS + dims[None, :], sums)
        tl.store(scales + part * 2 * ROWS + row, norm)
        tl.store(scales + part * 2 * ROWS + ROWS + row, best)
        tl.debug_barrier()
        whole = tl.atomic_add(counts + pair, 1, sem="acq_rel", scope="gpu") == count - 1
        if whole:
            tl.atomic_xchg(counts + pair, 0, sem="relaxed", scope="gpu")
            sums, norm = _together(partial, scales, first_part, count, ROWS, DIMS)
    result = sums / tl.where(norm > 0, norm, 1.0)[:, None]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=valid & good & whole)
    return good
