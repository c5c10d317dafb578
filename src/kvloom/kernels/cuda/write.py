"""Writes new K and V into the pool."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.kernels.cuda.launch import CHANGING, Launch, check, power_of_two

_VALUES = 2048  # of K, and of V, a program: two loads of 16 bytes a thread each


@triton.jit(do_not_specialize=CHANGING)
def _write(  # type: ignore[no-untyped-def]
    arena,
    page_map,
    k,
    v,
    slot_page,
    slot_offset,
    rows,
    layer,
    k_row,
    k_head,
    v_row,
    v_head,
    arena_block,
    map_page,
    map_layer,
    KV_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program is ROWS pairs of token and head."""
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row, head = (pair // KV_HEADS).to(tl.int64), pair % KV_HEADS
    page = tl.load(slot_page + row, mask=row < rows, other=-1)
    offset = tl.load(slot_offset + row, mask=row < rows, other=0)
    block_at = page_map + page.to(tl.int64) * map_page + layer * map_layer + head
    block = tl.load(block_at, mask=page >= 0, other=0)
    dims = tl.arange(0, DIMS)
    valid = (page >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
    to = arena + (block.to(tl.int64) * arena_block + offset * HEAD_DIM)[:, None] + dims[None, :]
    kind = arena.dtype.element_ty
    new = tl.load(k + (row * k_row + head * k_head)[:, None] + dims[None, :], mask=valid)
    tl.store(to, new.to(kind), mask=valid)
    new = tl.load(v + (row * v_row + head * v_head)[:, None] + dims[None, :], mask=valid)
    tl.store(to + PAGE_TOKENS * HEAD_DIM, new.to(kind), mask=valid)


def write_launch(
    arena: Tensor, page_map: Tensor, layer: int, k: Tensor, v: Tensor, slot_page: Tensor, slot_offset: Tensor
) -> Launch:
    """Returns how `write_kv` is launched."""
    (rows, kv_heads, head_dim), tokens = k.shape, arena.shape[2]
    check("arena", arena, -1, 2, tokens, head_dim)
    check("page_map", page_map, -1, -1, kv_heads, dtypes=(torch.int32,))
    check("k", k, rows, kv_heads, head_dim)
    check("v", v, rows, kv_heads, head_dim, dtypes=(k.dtype,))
    check("slot_page", slot_page, rows, dtypes=(torch.int32,))
    check("slot_offset", slot_offset, rows, dtypes=(torch.int32,))
    dims = power_of_two(head_dim)
    tile = max(1, _VALUES // dims)
    arguments = {
        **{"arena": arena, "page_map": page_map, "k": k, "v": v},
        **{"slot_page": slot_page, "slot_offset": slot_offset, "rows": rows, "layer": layer},
        **{"k_row": k.stride(0), "k_head": k.stride(1), "v_row": v.stride(0), "v_head": v.stride(1)},
        **{"arena_block": arena.stride(0), "map_page": page_map.stride(0), "map_layer": page_map.stride(1)},
        **{"KV_HEADS": kv_heads, "PAGE_TOKENS": tokens, "HEAD_DIM": head_dim, "DIMS": dims, "ROWS": tile},
    }
    return Launch(_write, (triton.cdiv(rows * kv_heads, tile),), arguments)


def write_kv(
    arena: Tensor, page_map: Tensor, layer: int, k: Tensor, v: Tensor, slot_page: Tensor, slot_offset: Tensor
) -> None:
    """Stores k, v [n, kv_heads, D] in arena [blocks, 2, T, D] at token slot_offset[i] of page slot_page[i].

    page_map [pages, layers, kv_heads], slot_page [n] and slot_offset [n] are int32 on the device. A row whose
    page is negative, a graph's padding, is stored nowhere.
    """
    write_launch(arena, page_map, layer, k, v, slot_page, slot_offset).run()
