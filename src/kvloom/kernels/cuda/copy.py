"""Copies blocks on the device: between arenas, and page to page; and the tables of blocks of a batch.

The lists may name blocks of any layers and heads, so what a send has for many layers is one launch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.kernels.cuda.launch import CHANGING, Launch, Launcher
from kvloom.kernels.reference import check

_WORDS = 4096  # of 4 bytes, a program: four loads of 16 bytes a thread
_WARPS = 8
_KINDS = (torch.int32, torch.int16, torch.uint8)


@triton.jit
def _move(  # type: ignore[no-untyped-def]
    source,
    target,
    own,
    peer,
    offset,
    count,
    BLOCK_WORDS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    TOKEN_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Moves a part of tokens [offset, offset + count) of K and V; all tokens take the words past them
    along."""
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    half = PAGE_TOKENS * TOKEN_WORDS
    low = offset * TOKEN_WORDS
    high = tl.where(count >= PAGE_TOKENS, BLOCK_WORDS, low + count * TOKEN_WORDS)
    wanted = ((word >= low) & (word < high)) | ((word >= low + half) & (word < high + half))
    wanted = wanted & (word < BLOCK_WORDS)
    values = tl.load(source + own.to(tl.int64) * BLOCK_WORDS + word, mask=wanted)
    tl.store(target + peer.to(tl.int64) * BLOCK_WORDS + word, values, mask=wanted)


@triton.jit(do_not_specialize=CHANGING)
def _copy_blocks(  # type: ignore[no-untyped-def]
    source,
    target,
    own,
    peer,
    offsets,
    counts,
    BLOCK_WORDS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    TOKEN_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """A program is a part of a block."""
    i = tl.program_id(0)
    from_block, to_block = tl.load(own + i), tl.load(peer + i)
    offset, count = tl.load(offsets + i), tl.load(counts + i)
    _move(
        source, target, from_block, to_block, offset, count, BLOCK_WORDS, PAGE_TOKENS, TOKEN_WORDS, WORDS
    )  # fmt: skip


@triton.jit(do_not_specialize=CHANGING)
def _copy_pages(  # type: ignore[no-untyped-def]
    arena,
    page_map,
    sources,
    targets,
    counts,
    map_page,
    MAP_BLOCKS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    TOKEN_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """A program is a part of a block of one layer and head of one copy."""
    i, place = tl.program_id(0) // MAP_BLOCKS, tl.program_id(0) % MAP_BLOCKS
    from_block = tl.load(page_map + tl.load(sources + i).to(tl.int64) * map_page + place)
    to_block = tl.load(page_map + tl.load(targets + i).to(tl.int64) * map_page + place)
    _move(
        arena, arena, from_block, to_block, i - i, tl.load(counts + i),
        BLOCK_WORDS, PAGE_TOKENS, TOKEN_WORDS, WORDS,
    )  # fmt: skip


def _layout(block_bytes: int, page_tokens: int, token_bytes: int) -> tuple[torch.dtype, int, dict[str, int]]:
    """Returns the widest word that tokens are whole numbers of, programs a block, and the layout in such
    words."""
    if 2 * page_tokens * token_bytes > block_bytes or block_bytes % 4:
        raise ValueError(
            f"block_bytes: want a multiple of 4 that holds {page_tokens} tokens of 2 x {token_bytes} bytes, "
            f"got {block_bytes}"
        )
    kind = next(kind for kind in _KINDS if token_bytes % kind.itemsize == 0)
    block, token = block_bytes // kind.itemsize, token_bytes // kind.itemsize
    words = {"BLOCK_WORDS": block, "PAGE_TOKENS": page_tokens, "TOKEN_WORDS": token, "WORDS": _WORDS}
    return kind, triton.cdiv(block, _WORDS), words


@Launcher
def copy_blocks(
    source: Tensor,
    target: Tensor,
    own: Tensor,
    peer: Tensor,
    offsets: Tensor,
    counts: Tensor,
    *,
    block_bytes: int,
    page_tokens: int,
    token_bytes: int,
) -> Launch:
    """Copies for each i tokens [offsets[i], offsets[i] + counts[i]) of K and of V from block own[i] of
    `source` to block peer[i] of `target`, both flat bytes, of a length that is a multiple of 4; all tokens of
    a block take the bytes past them along. The lists are [n] int32 on the device. No block is written twice,
    nor read and written."""
    kind, parts, words = _layout(block_bytes, page_tokens, token_bytes)
    lists = {"own": own, "peer": peer, "offsets": offsets, "counts": counts}
    for name, ids in lists.items():
        check(name, ids, own.shape[0], dtypes=(torch.int32,))
    check("source", source, -1, dtypes=(torch.uint8,))
    check("target", target, -1, dtypes=(torch.uint8,))
    arguments: dict[str, Any] = {"source": source.view(kind), "target": target.view(kind), **lists, **words}
    return Launch(_copy_blocks, (own.shape[0], parts), arguments, _WARPS)


@Launcher
def copy_pages(
    arena: Tensor,
    page_map: Tensor,
    sources: Tensor,
    targets: Tensor,
    counts: Tensor,
    *,
    block_bytes: int,
    page_tokens: int,
    token_bytes: int,
) -> Launch:
    """Copies for each i the first counts[i] tokens of page sources[i] to page targets[i], in all layers and
    heads at once: copy on write. arena: flat bytes; page_map [pages, layers, kv_heads] contiguous, and the
    lists [n], int32 on the device."""
    kind, parts, words = _layout(block_bytes, page_tokens, token_bytes)
    pages, layers, kv_heads = page_map.shape
    check("arena", arena, -1, dtypes=(torch.uint8,))
    check("page_map", page_map.flatten(1), pages, layers * kv_heads, dtypes=(torch.int32,))
    for name, ids in (("sources", sources), ("targets", targets), ("counts", counts)):
        check(name, ids, sources.shape[0], dtypes=(torch.int32,))
    arguments: dict[str, Any] = {
        **{"arena": arena.view(kind), "page_map": page_map, "sources": sources, "targets": targets},
        **{"counts": counts, "map_page": page_map.stride(0), "MAP_BLOCKS": layers * kv_heads, **words},
    }
    return Launch(_copy_pages, (sources.shape[0] * layers * kv_heads, parts), arguments, _WARPS)


_PAGES, _BLOCKS = 64, 64  # of a program


@triton.jit(do_not_specialize=(*CHANGING, "out_layer", "out_sequence", "out_head"))
def _block_tables(  # type: ignore[no-untyped-def]
    out,
    page_map,
    tables,
    lengths,
    out_layer,
    out_sequence,
    out_head,
    table_row,
    KV_HEADS: tl.constexpr,
    MAP_BLOCKS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """A program is PAGES pages of a sequence, and BLOCKS blocks of each."""
    sequence, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * PAGES
    held = tl.cdiv(tl.load(lengths + sequence), PAGE_TOKENS)
    if first >= held:
        return
    column, block = first + tl.arange(0, PAGES), tl.program_id(2) * BLOCKS + tl.arange(0, BLOCKS)
    page = tl.load(tables + sequence * table_row + column, mask=column < held, other=0).to(tl.int64)
    valid = (column < held)[:, None] & (block < MAP_BLOCKS)[None, :]
    found = tl.load(page_map + (page * MAP_BLOCKS)[:, None] + block[None, :], mask=valid)
    at = (
        (block // KV_HEADS).to(tl.int64) * out_layer + sequence * out_sequence + (block % KV_HEADS) * out_head
    )
    tl.store(out + at[None, :] + column[:, None], found, mask=valid)


@Launcher
def block_tables(out: Tensor, page_map: Tensor, tables: Tensor, lengths: Tensor, page_tokens: int) -> Launch:
    """Writes for each sequence the blocks of the pages that it has: out [layers, B, kv_heads, P], of which
    the last dimension alone is without gaps, from page_map [pages, layers, kv_heads], contiguous, tables
    [B, P] and lengths [B], all int32 on the device. Entries past a sequence's pages are left as they are."""
    (pages, layers, kv_heads), (batch, columns) = page_map.shape, tables.shape
    blocks = layers * kv_heads
    check("out", out, layers, batch, kv_heads, columns, dtypes=(torch.int32,))
    check("page_map", page_map.flatten(1), pages, blocks, dtypes=(torch.int32,))
    check("tables", tables, batch, columns, dtypes=(torch.int32,))
    check("lengths", lengths, batch, dtypes=(torch.int32,))
    arguments: dict[str, Any] = {
        **{"out": out, "page_map": page_map, "tables": tables, "lengths": lengths},
        **{"out_layer": out.stride(0), "out_sequence": out.stride(1), "out_head": out.stride(2)},
        **{"table_row": tables.stride(0), "KV_HEADS": kv_heads, "MAP_BLOCKS": blocks},
        **{"PAGE_TOKENS": page_tokens, "PAGES": _PAGES, "BLOCKS": _BLOCKS},
    }
    return Launch(
        _block_tables, (batch, triton.cdiv(columns, _PAGES), triton.cdiv(blocks, _BLOCKS)), arguments
    )
