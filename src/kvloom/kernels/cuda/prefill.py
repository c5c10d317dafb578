"""Prefill attention over the pool: the new tokens of all sequences of a job, in one launch.

FlashAttention-2 (Dao, 2023) over paged K and V. The query heads of a KV head share a program's rows, so
that it reads K and V once for all of them (vLLM's unified attention, 2025).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.kernels.cuda.launch import CHANGING, Launch, Launcher, power_of_two
from kvloom.kernels.cuda.tile import LOWEST, AttentionForm, attend_tile
from kvloom.kernels.reference import check


@triton.jit(do_not_specialize=CHANGING)
def _prefill(  # type: ignore[no-untyped-def]
    out,
    q,
    arena,
    page_map,
    tables,
    starts,
    begins,
    batch,
    layer,
    scale,
    bound,
    window,
    out_row,
    out_head,
    q_row,
    q_head,
    arena_block,
    map_page,
    map_layer,
    table_row,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program is a KV head and up to TOKENS new tokens of a sequence; row r is token r // GROUP. The latest
    tokens, which see the most, go first."""
    kv_head, chunk = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    # Sequence s has its chunks from begins[s] // TOKENS + s on: enough for each, known without the host.
    sequence, after = batch - batch, batch
    while after - sequence > 1:
        middle = (sequence + after) // 2
        reached = tl.load(begins + middle) // TOKENS + middle <= chunk
        sequence = tl.where(reached, middle, sequence)
        after = tl.where(reached, after, middle)
    begin = tl.load(begins + sequence)
    token = (chunk - begin // TOKENS - sequence) * TOKENS
    count = tl.load(begins + sequence + 1) - begin
    if token >= count:
        return
    start = tl.load(starts + sequence)
    lowest = start + token
    end = start + tl.minimum(token + TOKENS, count)

    row, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    query = lowest + row // GROUP
    heads = kv_head * GROUP + row % GROUP
    packed = (begin + token + row // GROUP).to(tl.int64)
    here = query < end
    valid = here[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = tl.load(q + (packed * q_row + heads * q_head)[:, None] + dims[None, :], mask=valid, other=0.0)
    block_map = page_map + layer * map_layer + kv_head
    table = tables + sequence.to(tl.int64) * table_row
    sums = tl.zeros([ROWS, DIMS], tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    best = tl.full([ROWS], LOWEST, tl.float32)

    # [first, left) is hidden from some by the window, [left, full) is seen by all, [full, end) is causal
    first = tl.maximum(lowest - window + 1, 0) if WINDOW else 0
    full = first + (lowest + 1 - first) // TILE * TILE
    left = first
    if WINDOW:
        left = tl.minimum(full, first + tl.cdiv(tl.maximum(end - window - first, 0), TILE) * TILE)
        for at in range(first, left, TILE):
            sums, norm, best = attend_tile(
                sums, norm, best, q_tile, query, at, end, arena, block_map, table, arena_block, map_page,
                scale, bound, window, PAGE_TOKENS, HEAD_DIM, DIMS, TILE, True, True, SOFTCAP, PRECISION,
            )  # fmt: skip
    for at in range(left, full, TILE):
        sums, norm, best = attend_tile(
            sums, norm, best, q_tile, query, at, end, arena, block_map, table, arena_block, map_page,
            scale, bound, window, PAGE_TOKENS, HEAD_DIM, DIMS, TILE, False, False, SOFTCAP, PRECISION,
        )  # fmt: skip
    for at in range(full, end, TILE):
        sums, norm, best = attend_tile(
            sums, norm, best, q_tile, query, at, end, arena, block_map, table, arena_block, map_page,
            scale, bound, window, PAGE_TOKENS, HEAD_DIM, DIMS, TILE, True, WINDOW, SOFTCAP, PRECISION,
        )  # fmt: skip

    to = out + (packed * out_row + heads * out_head)[:, None] + dims[None, :]
    tl.store(to, (sums / norm[:, None]).to(out.dtype.element_ty), mask=valid)


def _shape(form: AttentionForm, rows: int) -> tuple[int, int, int]:
    """Returns rows, tile and warps for sequences that have `rows` rows of queries for a KV head on average.

    Sums and scores are float32 in registers, q and the tiles that are under way in shared memory: of each a
    multiprocessor has about 230 KiB. float32 is multiplied without tensor cores, which takes registers too.
    """
    most, tile, row_bytes = 128, 64, form.token_bytes
    if form.arguments["PRECISION"] == "ieee":
        most, tile = 32, 32
    elif row_bytes > 512:
        tile = 32
    size = max(16, power_of_two(form.group), min(most, power_of_two(rows)))
    return size, tile, 8 if size * row_bytes >= 128 * 512 else 4


@Launcher
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
) -> Launch:
    """Computes causal attention of the new tokens of B sequences, packed: sequence b's queries are rows
    [begins[b], begins[b + 1]) of q [N, heads, D], at positions from starts[b] on. FlashAttention calls
    `begins` cu_seqlens.

    K and V, the new tokens' too, are read from the pool: arena [blocks, 2, T, D]; page_map [pages, layers,
    kv_heads], tables [B, pages of the longest], starts [B] and begins [B + 1] are int32 on the device, and
    read there only. A window n > 0 lets a query see the last n tokens, its own among them; a softcap c > 0
    bends scores s to c tanh(s / c). Rows of `out` from begins[B] on are left as they are.
    """
    form = AttentionForm.of(q, arena, page_map, scale, window, softcap)
    (count, heads, head_dim), batch = q.shape, starts.shape[0]
    check("out", out, count, heads, head_dim)
    check("tables", tables, batch, -1, dtypes=(torch.int32,))
    check("starts", starts, batch, dtypes=(torch.int32,))
    check("begins", begins, batch + 1, dtypes=(torch.int32,))
    rows, tile, warps = _shape(form, form.group * triton.cdiv(count, max(1, batch)))
    tokens = rows // form.group
    arguments: dict[str, Any] = {
        **{"out": out, "q": q, "arena": arena, "page_map": page_map, "tables": tables},
        **{"starts": starts, "begins": begins, "batch": batch, "layer": layer},
        **{"out_row": out.stride(0), "out_head": out.stride(1)},
        **{"q_row": q.stride(0), "q_head": q.stride(1), "table_row": tables.stride(0)},
        **{"GROUP": form.group, "ROWS": rows, "TOKENS": tokens, "TILE": tile},
    }
    grid = (page_map.shape[2], count // tokens + batch if batch else 0)
    return Launch(_prefill, grid, arguments | form.arguments, warps, stages=4)
