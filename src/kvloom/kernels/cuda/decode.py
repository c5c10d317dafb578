"""Decode attention over the pool: one new token a sequence, split over its tokens.

FlashDecoding (Dao et al., 2023): programs share a sequence out, and what each has seen is merged by the
logarithms of its sums. All query heads of a KV head are one program's rows, so K and V are read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.kernels.cuda.launch import CHANGING, Launch, Launcher, power_of_two
from kvloom.kernels.cuda.tile import LN2, LOWEST, AttentionForm, attend_tile
from kvloom.kernels.reference import check

_VALUES = 4096  # held by a program at once


@triton.jit(do_not_specialize=CHANGING)
def _merge(  # type: ignore[no-untyped-def]
    out,
    parts,
    lse,
    rows,
    heads,
    out_row,
    out_head,
    part_split,
    part_row,
    part_head,
    lse_split,
    lse_row,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program is ROWS pairs of row and head."""
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row, head = (pair // heads).to(tl.int64), pair % heads
    split, dims = tl.arange(0, SPLITS_PADDED).to(tl.int64), tl.arange(0, DIMS)
    there = (pair < rows * heads)[None, :] & (split < SPLITS)[:, None]
    at = split[:, None] * lse_split + (row * lse_row + head)[None, :]
    share = tl.load(lse + at, mask=there, other=float("-inf"))
    top = tl.max(share, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp(share - top[None, :])
    total = tl.sum(weights, 0)
    at = split[:, None] * part_split + (row * part_row + head * part_head)[None, :]
    valid = (weights > 0)[:, :, None] & (dims < HEAD_DIM)[None, None, :]
    part = tl.load(parts + at[:, :, None] + dims[None, None, :], mask=valid, other=0.0).to(tl.float32)
    merged = tl.sum(part * weights[:, :, None], 0) / tl.where(total > 0, total, 1.0)[:, None]
    inside = pair < rows * heads
    to = out + (row * out_row + head * out_head)[:, None] + dims[None, :]
    tl.store(to, merged.to(out.dtype.element_ty), mask=inside[:, None] & (dims < HEAD_DIM)[None, :])


@Launcher
def merge(out: Tensor, parts: Tensor, lse: Tensor) -> Launch:
    """Computes out [N, H, D] = attention over all tokens, from parts [S, N, H, D], each over some of them,
    and the natural logarithms lse [S, N, H] float32 of their sums of exponentials (FlashDecoding's
    reduction). A part whose lse is -inf saw no token and is not read; if all are, out is 0."""
    splits, rows, heads, head_dim = parts.shape
    check("parts", parts, -1, rows, heads, head_dim)
    check("lse", lse, splits, rows, heads, dtypes=(torch.float32,))
    check("out", out, rows, heads, head_dim)
    padded, dims = power_of_two(splits), power_of_two(head_dim)
    tile = max(1, _VALUES // (padded * dims))
    arguments = {
        **{"out": out, "parts": parts, "lse": lse, "rows": rows, "heads": heads},
        **{"out_row": out.stride(0), "out_head": out.stride(1)},
        **{"part_split": parts.stride(0), "part_row": parts.stride(1), "part_head": parts.stride(2)},
        **{"lse_split": lse.stride(0), "lse_row": lse.stride(1)},
        **{"SPLITS": splits, "SPLITS_PADDED": padded, "HEAD_DIM": head_dim, "DIMS": dims, "ROWS": tile},
    }
    return Launch(_merge, (triton.cdiv(rows * heads, tile),), arguments)


_TILE_BYTES = 32 << 10  # of K and V
_STAGES = 7  # of page table, page map, K and V: two tiles of K and V are under way
_PROGRAMS = 2  # on a multiprocessor, at least: 72 KiB of shared memory and up to 220 registers a thread
_MOST_SPLITS = 64


@triton.jit(do_not_specialize=CHANGING)
def _decode(  # type: ignore[no-untyped-def]
    out,  # [SPLITS, B, heads, D]
    lse,  # [SPLITS, B, heads], or None of one split
    q,
    arena,
    page_map,
    tables,
    lengths,
    layer,
    scale,
    bound,
    window,
    out_split,
    out_row,
    out_head,
    lse_split,
    lse_row,
    q_row,
    q_head,
    arena_block,
    map_page,
    map_layer,
    table_row,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program is a sequence, a KV head and a split; splits are whole tiles, and some may be empty."""
    sequence, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    start = tl.maximum(length - window, 0) if WINDOW else 0
    span = tl.cdiv(tl.cdiv(length - start, SPLITS), TILE) * TILE
    first = start + split * span
    end = tl.minimum(first + span, length)

    row, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    heads = kv_head * GROUP + row
    if SPLITS > 1:
        lse_at = lse + split.to(tl.int64) * lse_split + sequence * lse_row + heads
        if first >= end:
            tl.store(lse_at, tl.full([ROWS], float("-inf"), tl.float32), mask=row < GROUP)
            return
    valid = (row < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = tl.load(q + sequence * q_row + (heads * q_head)[:, None] + dims[None, :], mask=valid, other=0.0)
    query = tl.zeros([ROWS], tl.int32) + length
    block_map = page_map + layer * map_layer + kv_head
    table = tables + sequence * table_row
    sums = tl.zeros([ROWS, DIMS], tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    best = tl.full([ROWS], LOWEST, tl.float32)

    full = first + tl.maximum(end - first, 0) // TILE * TILE
    for at in range(first, full, TILE):
        sums, norm, best = attend_tile(
            sums, norm, best, q_tile, query, at, end, arena, block_map, table, arena_block, map_page,
            scale, bound, 0, PAGE_TOKENS, HEAD_DIM, DIMS, TILE, False, False, SOFTCAP, PRECISION,
        )  # fmt: skip
    if full < end:
        sums, norm, best = attend_tile(
            sums, norm, best, q_tile, query, full, end, arena, block_map, table, arena_block, map_page,
            scale, bound, 0, PAGE_TOKENS, HEAD_DIM, DIMS, TILE, True, False, SOFTCAP, PRECISION,
        )  # fmt: skip

    result = sums / tl.where(norm > 0, norm, 1.0)[:, None]
    to = out + split.to(tl.int64) * out_split + sequence * out_row
    to = to + (heads * out_head)[:, None] + dims[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=valid)
    if SPLITS > 1:
        tl.store(lse_at, tl.where(norm > 0, best * LN2 + tl.log(norm), float("-inf")), mask=row < GROUP)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Room for what the splits of a decode step have seen: parts [S, B, heads, D], lse [S, B, heads], both
    float32. S is the number of splits, whatever the lengths, so that a captured graph can be replayed."""

    parts: Tensor
    lse: Tensor

    @classmethod
    def make(cls, splits: int, batch: int, heads: int, head_dim: int, device: torch.device) -> Workspace:
        parts = torch.empty(splits, batch, heads, head_dim, dtype=torch.float32, device=device)
        return cls(parts, torch.empty(splits, batch, heads, dtype=torch.float32, device=device))

    @property
    def splits(self) -> int:
        return self.parts.shape[0]


def splits_for(batch: int, kv_heads: int, multiprocessors: int, longest: int) -> int:
    """Returns the splits that give every multiprocessor of a share its programs at once, and none fewer than
    64 of `longest` tokens; 1 if the batch alone does."""
    room = multiprocessors * _PROGRAMS // max(1, batch * kv_heads)
    return max(1, min(room, _MOST_SPLITS, longest // 64))


def workspace(
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    multiprocessors: int,
    longest: int,
    device: torch.device,
) -> Workspace:
    """Returns the room that decode steps of up to `longest` tokens need on so many multiprocessors."""
    splits = splits_for(batch, kv_heads, multiprocessors, longest)
    return Workspace.make(splits, batch, heads, head_dim, device)


@Launcher
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
    *,
    workspace: Workspace | None = None,
) -> Launch:
    """Attends with one new token per sequence, q [B, heads, D], to its lengths[b] tokens, itself included.

    arena [blocks, 2, T, D]; page_map [pages, layers, kv_heads], tables [B, pages of the longest] and lengths
    [B] are int32 on the device, and read there only. A window n > 0 hides all but the last n tokens, which
    are not read; a softcap c > 0 bends scores s to c tanh(s / c). A length of 0 gives 0, so a graph's padding
    needs no table. Without a workspace a sequence and a KV head are one program; with one, several splits,
    whose merge follows.
    """
    form = AttentionForm.of(q, arena, page_map, scale, window, softcap)
    batch, heads, head_dim = q.shape
    check("out", out, batch, heads, head_dim)
    check("tables", tables, batch, -1, dtypes=(torch.int32,))
    check("lengths", lengths, batch, dtypes=(torch.int32,))
    splits = workspace.splits if workspace is not None else 1
    to, lse, merging = out[None], None, None
    if workspace is not None and splits > 1:
        check("workspace", workspace.parts, splits, -1, heads, head_dim, dtypes=(torch.float32,))
        if workspace.parts.shape[1] < batch:
            raise ValueError(f"workspace: want room for {batch} sequences, got {workspace.parts.shape[1]}")
        to, lse = workspace.parts[:, :batch], workspace.lse[:, :batch]
        merging = merge.launch(out, to, lse)
    arguments: dict[str, Any] = {
        **{"out": to, "lse": lse, "q": q, "arena": arena, "page_map": page_map, "tables": tables},
        **{"lengths": lengths, "layer": layer},
        **{"out_split": to.stride(0), "out_row": to.stride(1), "out_head": to.stride(2)},
        **{"lse_split": 0 if lse is None else lse.stride(0), "lse_row": 0 if lse is None else lse.stride(1)},
        **{"q_row": q.stride(0), "q_head": q.stride(1), "table_row": tables.stride(0)},
        **{"SPLITS": splits, "GROUP": form.group, "ROWS": max(16, power_of_two(form.group))},
        **{"TILE": max(16, min(128, _TILE_BYTES // form.token_bytes))},
    }
    grid = (batch, page_map.shape[2], splits)
    return Launch(_decode, grid, arguments | form.arguments, warps=4, stages=_STAGES, then=merging)
