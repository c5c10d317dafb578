"""Products in FP8 (W8A8) on a GPU: rows of inputs are rounded by a kernel, each with a scale of its own, and
multiplied by torch's scaled product, which is cuBLAS' or CUTLASS'."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.kernels.cuda.launch import CHANGING, Launch, power_of_two
from kvloom.kernels.cuda.reference import MOST
from kvloom.kernels.cuda.tile import DTYPES
from kvloom.kernels.reference import check

_MOST = tl.constexpr(MOST)
_TILE = 4096  # numbers of a row at a time


@triton.jit(do_not_specialize=CHANGING)
def _round_rows(  # type: ignore[no-untyped-def]
    out, scales, x, columns, x_row, TILE: tl.constexpr
):
    """A program is a row, which it reads twice: the second time out of a cache."""
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, TILE)
    from_, to = x + row * x_row, out + row * columns
    tops = tl.zeros([TILE], tl.float32)
    for first in range(0, columns, TILE):
        at = first + each
        tops = tl.maximum(tops, tl.abs(tl.load(from_ + at, mask=at < columns, other=0.0).to(tl.float32)))
    most = tl.max(tops, 0)
    inverse = tl.where(most > 0, _MOST / most, 0.0)
    tl.store(scales + row, most / _MOST)
    for first in range(0, columns, TILE):
        at = first + each
        values = tl.load(from_ + at, mask=at < columns, other=0.0).to(tl.float32)
        tl.store(to + at, (values * inverse).to(out.dtype.element_ty), mask=at < columns)


def round_launch(out: Tensor, scales: Tensor, x: Tensor) -> Launch:
    """Returns how `round_rows` is launched for its outputs, float8_e4m3fn [n, K] and float32 [n, 1]."""
    rows, columns = x.shape
    check("x", x, rows, columns, dtypes=DTYPES)
    tile = min(_TILE, power_of_two(columns))
    arguments = {"out": out, "scales": scales, "x": x, "columns": columns, "x_row": x.stride(0), "TILE": tile}
    return Launch(_round_rows, (rows,), arguments, warps=8)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x [n, K] as float8_e4m3fn [n, K] and scales, float32 [n, 1], as the twin in
    `kernels/cuda/reference.py` says."""
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    round_launch(out, scales, x).run()
    return out, scales


def scaled_product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x [n, K] · weight [N, K]ᵀ + bias [N] in the number format of x, with x rounded to FP8, as the
    twin in `kernels/cuda/reference.py` says. N and K are multiples of 16. torch's product applies scales
    of rows only where it gives bfloat16; otherwise they are applied to what it gives in float32."""
    rounded, factors = round_rows(x)
    weight, by_row = codes.t(), x.dtype == torch.bfloat16
    if by_row:
        out = torch._scaled_mm(rounded, weight, factors, scales.t(), out_dtype=torch.bfloat16)
    else:
        one = torch.ones((), device=x.device)
        out = torch._scaled_mm(rounded, weight, one, one, out_dtype=torch.float32) * factors * scales.t()
    return (out if bias is None else out + bias).to(x.dtype)
