"""Decode attention over the pool: one new token a sequence, split over its tokens.

FlashDecoding (Dao et al., 2023): programs share a sequence out, and what each has seen is merged by the
logarithms of its sums. All query heads of a KV head are one program's rows, so K and V are read once. How
many programs a sequence has follows from its length, on the device, so that recordings need not know it: a
kernel lists the parts of all sequences, and each program takes the part of its number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.kernels.cuda.launch import CHANGING, Launch, Launcher, power_of_two
from kvloom.kernels.cuda.tile import LN2, LOWEST, AttentionForm, attend_tile, token_bytes
from kvloom.kernels.reference import check

_VALUES = 4096  # held by a program at once
_PARTS = 16  # merged at once
_HALVINGS = tl.constexpr(24)  # of a range of spans: no sequence has 2 ** 24 times the least
_SEQUENCES = 256  # that one compiled kernel lists the parts of, at least


@triton.jit(do_not_specialize=CHANGING)
def _list(  # type: ignore[no-untyped-def]
    work,  # [most, 3]: sequence, first token, end
    begins,  # [B + 1]
    lengths,
    batch,
    window,
    most,
    LEAST: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Lists all parts in one program. They have the same number of tokens, except each sequence's last: the
    least number that leaves no more parts than `most`."""
    row = tl.arange(0, SEQUENCES)
    length = tl.load(lengths + row, mask=row < batch, other=0)
    held = tl.where(window > 0, tl.minimum(length, window), length)
    low = 1
    high = tl.maximum(1, tl.cdiv(tl.max(held, 0), LEAST))
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        fits = tl.sum(tl.cdiv(held, middle * LEAST), 0) <= most
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    span = high * LEAST
    count = tl.cdiv(held, span)
    ends = tl.cumsum(count, 0)
    tl.store(begins + 1 + row, ends, mask=row < batch)
    tl.store(begins + row, 0, mask=row == 0)
    total = tl.sum(count, 0)
    for at in range(0, most, TILE):
        part = at + tl.arange(0, TILE)
        owner = tl.sum((ends[None, :] <= part[:, None]).to(tl.int32), 1)
        its = row[None, :] == owner[:, None]
        begin = tl.sum(tl.where(its, (ends - count)[None, :], 0), 1)
        end = tl.sum(tl.where(its, length[None, :], 0), 1)
        first = end - tl.sum(tl.where(its, held[None, :], 0), 1) + (part - begin) * span
        there = part < total
        to, inside = work + 3 * part, part < most
        tl.store(to, tl.where(there, owner, 0), mask=inside)
        tl.store(to + 1, tl.where(there, first, 0), mask=inside)
        tl.store(to + 2, tl.where(there, tl.minimum(first + span, end), 0), mask=inside)


@Launcher
def list_parts(work: Tensor, begins: Tensor, lengths: Tensor, window: int, least: int) -> Launch:
    """Lists the parts of decode attention, as `reference.list_parts` in this folder says; all on the
    device."""
    batch, most = lengths.shape[0], work.shape[0]
    check("lengths", lengths, batch, dtypes=(torch.int32,))
    check("work", work, most, 3, dtypes=(torch.int32,))
    check("begins", begins, batch + 1, dtypes=(torch.int32,))
    if most < batch:
        raise ValueError(f"work: want room for a part of each of {batch} sequences, got {most}")
    arguments = {
        **{"work": work, "begins": begins, "lengths": lengths},
        **{"batch": batch, "window": window, "most": most},
        **{"LEAST": least, "SEQUENCES": max(_SEQUENCES, power_of_two(batch)), "TILE": _PARTS},
    }
    return Launch(_list, (1,), arguments)


@triton.jit(do_not_specialize=CHANGING)
def _merge(  # type: ignore[no-untyped-def]
    out,
    parts,
    lse,
    begins,
    heads,
    out_row,
    out_head,
    part_row,
    part_head,
    lse_row,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """A program is a row and HEADS of its heads, and takes PARTS of its parts at a time."""
    row = tl.program_id(0).to(tl.int64)
    head, dims = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, DIMS)
    first, end = tl.load(begins + row), tl.load(begins + row + 1)
    sums = tl.zeros([HEADS, DIMS], tl.float32)
    norm = tl.zeros([HEADS], tl.float32)
    best = tl.full([HEADS], LOWEST, tl.float32)
    inside = (head < heads)[:, None] & (dims < HEAD_DIM)[None, :]
    for at in range(first, end, PARTS):
        part = at + tl.arange(0, PARTS)
        there = (part < end)[:, None] & (head < heads)[None, :]
        seen = part.to(tl.int64)[:, None]
        share = tl.load(lse + seen * lse_row + head[None, :], mask=there, other=float("-inf"))
        top = tl.maximum(best, tl.max(share, 0))
        weights = tl.exp(share - top[None, :])
        shrink = tl.exp(best - top)
        norm = norm * shrink + tl.sum(weights, 0)
        values = parts + (seen * part_row + head[None, :] * part_head)[:, :, None] + dims[None, None, :]
        valid = there[:, :, None] & (dims < HEAD_DIM)[None, None, :]
        these = tl.load(values, mask=valid, other=0.0).to(tl.float32)
        sums = sums * shrink[:, None] + tl.sum(these * weights[:, :, None], 0)
        best = top
    merged = sums / tl.where(norm > 0, norm, 1.0)[:, None]
    to = out + row * out_row + (head * out_head)[:, None] + dims[None, :]
    tl.store(to, merged.to(out.dtype.element_ty), mask=inside)


@Launcher
def merge(out: Tensor, parts: Tensor, lse: Tensor, begins: Tensor) -> Launch:
    """Computes out [N, H, D] = attention over all tokens of each row, whose parts are those from begins[n] up
    to begins[n + 1] of parts [P, H, D], each over some of its tokens; lse [P, H] float32 are the natural
    logarithms of their sums of exponentials (FlashDecoding's reduction). A row without parts is 0."""
    (rows, heads, head_dim), count = out.shape, parts.shape[0]
    check("out", out, rows, heads, head_dim)
    check("parts", parts, count, heads, head_dim)
    check("lse", lse, count, heads, dtypes=(torch.float32,))
    check("begins", begins, rows + 1, dtypes=(torch.int32,))
    dims = power_of_two(head_dim)
    tile = max(1, min(power_of_two(heads), _VALUES // (_PARTS * dims)))
    arguments = {
        **{"out": out, "parts": parts, "lse": lse, "begins": begins, "heads": heads},
        **{"out_row": out.stride(0), "out_head": out.stride(1)},
        **{"part_row": parts.stride(0), "part_head": parts.stride(1), "lse_row": lse.stride(0)},
        **{"HEAD_DIM": head_dim, "DIMS": dims, "PARTS": _PARTS, "HEADS": tile},
    }
    return Launch(_merge, (rows, triton.cdiv(heads, tile)), arguments)


_TILE_BYTES = 32 << 10  # of K and V
_STAGES = 7  # of page table, page map, K and V: two tiles of K and V are under way
_PROGRAMS = 2  # on a multiprocessor, at least: 72 KiB of shared memory and up to 220 registers a thread
_LEAST = 64  # tokens of a part


@triton.jit(do_not_specialize=CHANGING)
def _decode(  # type: ignore[no-untyped-def]
    out,  # [parts or B, heads, D]
    lse,  # [parts, heads], or None
    work,  # [parts, 3], or None
    q,
    arena,
    page_map,
    tables,
    lengths,
    layer,
    scale,
    bound,
    window,
    out_row,
    out_head,
    lse_row,
    q_row,
    q_head,
    arena_block,
    map_page,
    map_layer,
    table_row,
    SPLIT: tl.constexpr,
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
    """A program is a KV head and a part: with SPLIT one of the list's, if there are so many, else a
    sequence."""
    part, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if SPLIT:
        sequence = tl.load(work + 3 * part).to(tl.int64)
        first, end = tl.load(work + 3 * part + 1), tl.load(work + 3 * part + 2)
        if first >= end:
            return
    else:
        sequence = part
        end = tl.load(lengths + sequence)
        first = tl.maximum(end - window, 0) if WINDOW else 0

    row, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    heads = kv_head * GROUP + row
    valid = (row < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = tl.load(q + sequence * q_row + (heads * q_head)[:, None] + dims[None, :], mask=valid, other=0.0)
    query = tl.zeros([ROWS], tl.int32) + end
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
    to = out + part * out_row + (heads * out_head)[:, None] + dims[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=valid)
    if SPLIT:
        tl.store(lse + part * lse_row + heads, best * LN2 + tl.log(norm), mask=row < GROUP)


@dataclass(frozen=True, slots=True)
class Workspace:
    """The parts of a decode step's sequences, and room for what each has seen. There is room for as many
    parts whatever the lengths are, so that a captured graph can be replayed."""

    parts: Tensor  # [P, heads, D] float32
    lse: Tensor  # [P, heads] float32
    work: Tensor  # [P, 3] int32: each part's sequence, first token and end
    begins: Tensor  # [B + 1] int32: each sequence's first part, and how many parts there are

    @classmethod
    def make(cls, parts: int, batch: int, heads: int, head_dim: int, device: torch.device) -> Workspace:
        """Returns room; nothing is listed yet."""
        values = torch.empty(parts, heads, head_dim, dtype=torch.float32, device=device)
        lse = torch.empty(parts, heads, dtype=torch.float32, device=device)
        work, begins = (torch.empty(n, dtype=torch.int32, device=device) for n in (3 * parts, batch + 1))
        return cls(values, lse, work.view(parts, 3), begins)


def parts_for(batch: int, kv_heads: int, multiprocessors: int, longest: int, least: int = _LEAST) -> int:
    """Returns the number of parts of a batch's sequences, for each KV head. It is one wave: as many as give
    every multiprocessor of a share its programs at once. If the sequences alone nearly fill the wave, it is
    half a wave more than they are, so that long ones can still be cut. No part has fewer than `least`
    tokens."""
    room = multiprocessors * _PROGRAMS // kv_heads
    return min(max(room, batch + room // 2), batch * max(1, -(-longest // least)))


def workspace(
    q: Tensor, lengths: Tensor, kv_heads: int, multiprocessors: int, longest: int, window: int = 0
) -> Workspace | None:
    """Returns the parts of a decode step of q [B, heads, D] over sequences of lengths [B], none of more than
    `longest` tokens, on so many multiprocessors; None if they are whole sequences. window: of the layers that
    are to use it."""
    batch, heads, head_dim = q.shape
    least = max(_LEAST, _tile(token_bytes(head_dim, q.dtype)))
    longest = min(longest, window) if window else longest
    parts = parts_for(batch, kv_heads, multiprocessors, longest, least)
    if parts <= batch:
        return None
    made = Workspace.make(parts, batch, heads, head_dim, q.device)
    list_parts(made.work, made.begins, lengths, window, least)
    return made


def _tile(size: int) -> int:
    """Returns the tokens of a tile if one has so many bytes."""
    return max(16, min(128, _TILE_BYTES // size))


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
    needs no table. Without a workspace a sequence and a KV head are one program; with one, made for these
    lengths and this window, the programs are its parts, whose merge follows.
    """
    form = AttentionForm.of(q, arena, page_map, scale, window, softcap)
    batch, heads, head_dim = q.shape
    check("out", out, batch, heads, head_dim)
    check("tables", tables, batch, -1, dtypes=(torch.int32,))
    check("lengths", lengths, batch, dtypes=(torch.int32,))
    parts, to, lse, work, merging = batch, out, None, None, None
    if workspace is not None:
        check("workspace", workspace.parts, -1, heads, head_dim, dtypes=(torch.float32,))
        to, lse, work = workspace.parts, workspace.lse, workspace.work
        parts, merging = to.shape[0], merge.launch(out, to, lse, workspace.begins)
    arguments: dict[str, Any] = {
        **{"out": to, "lse": lse, "work": work, "q": q, "arena": arena, "page_map": page_map},
        **{"tables": tables, "lengths": lengths, "layer": layer},
        **{"out_row": to.stride(0), "out_head": to.stride(1), "lse_row": 0 if lse is None else lse.stride(0)},
        **{"q_row": q.stride(0), "q_head": q.stride(1), "table_row": tables.stride(0)},
        **{"SPLIT": work is not None, "GROUP": form.group, "ROWS": max(16, power_of_two(form.group))},
        **{"TILE": _tile(form.token_bytes)},
    }
    grid = (parts, page_map.shape[2])
    return Launch(_decode, grid, arguments | form.arguments, warps=4, stages=_STAGES, then=merging)
