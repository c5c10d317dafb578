"""Merge attention over parts of the tokens into attention over all of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.kernels.triton.launch import CHANGING, Launch, check, power_of_two

_VALUES = 4096  # held by a program at once


@triton.jit(do_not_specialize=CHANGING)
def _merge(  # type: ignore[no-untyped-def]
    out,
    out_lse,  # or None
    parts,
    lse,
    rows,
    heads,
    out_row,
    out_head,
    out_lse_row,
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
    if out_lse is not None:
        tl.store(out_lse + row * out_lse_row + head, top + tl.log(total), mask=inside)


def merge_launch(out: Tensor, parts: Tensor, lse: Tensor, out_lse: Tensor | None = None) -> Launch:
    """How `merge` is launched."""
    splits, rows, heads, head_dim = parts.shape
    check("parts", parts, -1, rows, heads, head_dim)
    check("lse", lse, splits, rows, heads, dtypes=(torch.float32,))
    check("out", out, rows, heads, head_dim)
    if out_lse is not None:
        check("out_lse", out_lse, rows, heads, dtypes=(torch.float32,))
    padded, dims = power_of_two(splits), power_of_two(head_dim)
    tile = max(1, _VALUES // (padded * dims))
    arguments = {
        **{"out": out, "out_lse": out_lse, "parts": parts, "lse": lse, "rows": rows, "heads": heads},
        **{"out_row": out.stride(0), "out_head": out.stride(1)},
        **{"out_lse_row": 0 if out_lse is None else out_lse.stride(0)},
        **{"part_split": parts.stride(0), "part_row": parts.stride(1), "part_head": parts.stride(2)},
        **{"lse_split": lse.stride(0), "lse_row": lse.stride(1)},
        **{"SPLITS": splits, "SPLITS_PADDED": padded, "HEAD_DIM": head_dim, "DIMS": dims, "ROWS": tile},
    }
    return Launch(_merge, (triton.cdiv(rows * heads, tile),), arguments)


def merge(out: Tensor, parts: Tensor, lse: Tensor, out_lse: Tensor | None = None) -> None:
    """out [N, H, D] = attention over all tokens, from parts [S, N, H, D], each over some of them, and the
    natural logarithms lse [S, N, H] float32 of their sums of exponentials (FlashDecoding's reduction).

    A part whose lse is -inf saw no token and is not read; where all are, out is 0. out_lse [N, H] gets the
    logarithm of the whole sum, so that what was merged can be merged again.
    """
    merge_launch(out, parts, lse, out_lse).run()
