"""RMSNorm in one pass, with the residual's addition before it where there is one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.kernels.triton.launch import CHANGING, Launch, check, power_of_two

_NORM_VALUES = 2048  # a program, where rows are shorter


@triton.jit(do_not_specialize=CHANGING)
def _norm(  # type: ignore[no-untyped-def]
    out,
    total,  # or None: nothing is added
    x,
    residual,
    weight,
    rows,
    eps,
    offset,
    x_row,
    x_head,
    residual_row,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program is ROWS rows; row r is head r % HEADS of token r // HEADS."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, SIZE_PADDED)
    valid = (row < rows)[:, None] & (at < SIZE)[None, :]
    kind = out.dtype.element_ty
    x_at = x + (row // HEADS * x_row + row % HEADS * x_head)[:, None] + at[None, :]
    values = tl.load(x_at, mask=valid, other=0.0).to(tl.float32)
    if total is not None:
        values += tl.load(
            residual + (row * residual_row)[:, None] + at[None, :], mask=valid, other=0.0
        ).to(tl.float32)  # fmt: skip
        values = values.to(kind)
        tl.store(total + (row * SIZE)[:, None] + at[None, :], values, mask=valid)
        values = values.to(tl.float32)
    inverse = 1 / tl.sqrt(tl.sum(values * values, 1) / SIZE + eps)
    normal = values * inverse[:, None]
    scales = tl.load(weight + at, mask=at < SIZE, other=0.0).to(tl.float32)[None, :]
    normal = normal * (offset + scales) if OFFSET else normal.to(kind).to(tl.float32) * scales
    tl.store(out + (row * SIZE)[:, None] + at[None, :], normal.to(kind), mask=valid)


def norm_launch(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    total: Tensor | None = None,
    residual: Tensor | None = None,
) -> Launch:
    """How `rms_norm` is launched, and with total and residual, `add_rms_norm`."""
    size = x.shape[-1]
    flat = x if x.dim() == 3 else x.reshape(-1, 1, size)
    check("x", flat, -1, -1, size)
    check("weight", weight, size, dtypes=(x.dtype,))
    if residual is not None:
        check("residual", residual, flat.shape[0], size, dtypes=(x.dtype,))
    rows, padded = flat.shape[0] * flat.shape[1], power_of_two(size)
    tile = max(1, _NORM_VALUES // padded)
    arguments = {
        **{"out": out, "total": total, "x": flat, "residual": residual, "weight": weight},
        **{"rows": rows, "eps": eps, "offset": offset, "x_row": flat.stride(0), "x_head": flat.stride(1)},
        **{"residual_row": 0 if residual is None else residual.stride(0), "HEADS": flat.shape[1]},
        **{"SIZE": size, "SIZE_PADDED": padded, "OFFSET": offset != 0, "ROWS": tile},
    }
    warps = max(4, min(16, padded // 512))
    return Launch(_norm, (triton.cdiv(rows, tile),), arguments, warps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Normalise x [..., H] by its root mean square and scale by offset + weight [H] (Zhang and Sennrich,
    2019); Gemma's offset is 1. x [n, heads, H] may be a part of wider rows."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    norm_launch(out, x, weight, eps, offset).run()
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """x + residual, both [n, H]: normalised as by `rms_norm`, and as it is."""
    check("x", x, *residual.shape)
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    norm_launch(out, x, weight, eps, offset, total, residual).run()
    return out, total
