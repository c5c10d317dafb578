"""Products over weights of 4 and 8 bits on a GPU.

Codes stay as a checkpoint's reader gives them (`exec/quantized.py`): a program reads a tile of them once,
widens it in registers, and multiplies in the number format of the inputs. The weight is the left operand,
which the tensor cores may take from registers, so the widened tile is not written to shared memory (Marlin,
Frantar et al., 2024, does so too).

If weights and inputs are FP8 (W8A8), a kernel rounds the rows of inputs, each with a scale of its own, and
torch's scaled product multiplies them, which is cuBLAS' or CUTLASS'.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.kernels.cuda.launch import CHANGING, Launch, power_of_two
from kvloom.kernels.cuda.reference import FP8_MAX
from kvloom.kernels.cuda.tile import DTYPES
from kvloom.kernels.reference import check

CODES = torch.uint8, torch.int8, torch.float8_e4m3fn
FACTORS = torch.float16, torch.float32
_FEW = 32  # rows, up to which a product is bound by reading the weight


@triton.jit
def _factors(  # type: ignore[no-untyped-def]
    at, row, first, groups, columns, GROUP: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Returns the scales or the offsets of a tile [OUTPUTS, PARTS, 1] whose inputs begin with `first`. GROUP:
    inputs of a group, 0 for all."""
    part = tl.arange(0, PARTS)
    group = (first // GROUP if GROUP else 0) + part
    to = at + (row * groups)[:, None] + group[None, :]
    found = tl.load(to) if EVEN else tl.load(to, mask=(first + part * SPAN < columns)[None, :], other=0.0)
    return found.to(tl.float32)[:, :, None]


@triton.jit(do_not_specialize=CHANGING)
def _quantized(  # type: ignore[no-untyped-def]
    out,
    x,
    codes,
    scales,
    offsets,  # or None
    bias,  # or None
    rows,
    outputs,
    columns,
    groups,
    x_row,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program is OUTPUTS outputs of ROWS rows. It takes TILE inputs at a time, of which each SPAN share a
    scale."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    held = tl.minimum(output, outputs - 1).to(tl.int64)  # what is past the last is read again, and not kept
    read = tl.minimum(row, rows - 1).to(tl.int64)
    each = tl.arange(0, TILE)
    x_at = x + (read * x_row)[None, :] + each[:, None]  # [TILE, ROWS]
    if BITS == 4:
        byte = tl.arange(0, TILE // 2)
        code_at = codes + (held * (columns // 2))[:, None] + byte[None, :]
    else:
        byte = each
        code_at = codes + (held * columns)[:, None] + byte[None, :]
    kind = x.dtype.element_ty
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for first in range(0, columns, TILE):
        if EVEN:
            packed = tl.load(code_at)
            inputs = tl.load(x_at)
        else:
            packed = tl.load(code_at, mask=(byte < (columns - first) * BITS // 8)[None, :], other=0.0)
            inputs = tl.load(x_at, mask=(each < columns - first)[:, None], other=0.0)
        numbers = tl.interleave(packed & 15, packed >> 4) if BITS == 4 else packed
        scale = _factors(scales, held, first, groups, columns, GROUP, SPAN, PARTS, EVEN)
        wide = tl.reshape(numbers.to(tl.float32), [OUTPUTS, PARTS, SPAN]) * scale
        if offsets is not None:
            wide = wide + _factors(offsets, held, first, groups, columns, GROUP, SPAN, PARTS, EVEN)
        weight = tl.reshape(wide, [OUTPUTS, TILE]).to(kind)
        sums = tl.dot(weight, inputs, sums, input_precision=PRECISION)
        code_at += TILE * BITS // 8
        x_at += TILE
    if bias is not None:
        sums += tl.load(bias + held).to(tl.float32)[:, None]
    to = out + (row.to(tl.int64) * outputs)[None, :] + output[:, None]
    tl.store(to, sums.to(out.dtype.element_ty), mask=(row < rows)[None, :] & (output < outputs)[:, None])


def _shape(rows: int, wide: bool) -> tuple[int, int, int, int, int]:
    """Returns the outputs, rows and inputs of a tile, warps and stages. With few rows there are many programs
    with long tiles, which read at once; with many there is a warpgroup's product. float32 is multiplied
    without tensor cores."""
    if wide:
        return 32, 16, 32, 4, 2
    if rows <= _FEW:
        return 32, max(16, power_of_two(rows)), 128, 4, 4
    if rows <= 2 * _FEW:
        return 64, 2 * _FEW, 64, 4, 4
    return 128, 128, 64, 8, 3


def quantized_launch(
    out: Tensor, x: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor | None, bias: Tensor | None
) -> Launch:
    """Returns how `quantized_product` is launched for its output [n, N]."""
    (rows, columns), (outputs, groups) = x.shape, scales.shape
    bits = 4 if codes.dtype == torch.uint8 else 8
    check("x", x, rows, columns, dtypes=DTYPES)
    check("scales", scales, outputs, groups, dtypes=FACTORS)
    check("codes", codes, outputs, columns * bits // 8, dtypes=CODES)
    if offsets is not None:
        check("offsets", offsets, outputs, groups, dtypes=FACTORS)
    if bias is not None:
        check("bias", bias, outputs)
    if columns % groups or not all(one is None or one.is_contiguous() for one in (codes, scales, offsets)):
        raise ValueError(f"scales: {groups} for {columns} inputs; a divisor, and all contiguous, are right")
    wide = x.dtype == torch.float32
    tile_outputs, tile_rows, tile, warps, stages = _shape(rows, wide)
    group = 0 if groups == 1 else columns // groups
    span = min(group, tile) if group else tile
    if tile % span or (group and group % span):
        raise ValueError(f"scales: groups of {group} inputs; powers of two or whole rows are right")
    arguments = {
        **{"out": out, "x": x, "codes": codes, "scales": scales, "offsets": offsets, "bias": bias},
        **{"rows": rows, "outputs": outputs, "columns": columns, "groups": groups, "x_row": x.stride(0)},
        **{"BITS": bits, "GROUP": group, "SPAN": span, "PARTS": tile // span},
        **{"OUTPUTS": tile_outputs, "ROWS": tile_rows, "TILE": tile, "EVEN": columns % tile == 0},
        **{"PRECISION": "ieee" if wide else "tf32"},
    }
    grid = triton.cdiv(outputs, tile_outputs), triton.cdiv(rows, tile_rows)
    return Launch(_quantized, grid, arguments, warps, stages)


def quantized_product(
    x: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Returns x [n, K] · weight [N, K]ᵀ + bias [N] in the number format of x, over a weight of 4 or 8 bits in
    groups, as the twin in `kernels/cuda/reference.py` says. Raises ValueError for shapes that do not fit."""
    out = torch.empty(x.shape[0], scales.shape[0], dtype=x.dtype, device=x.device)
    quantized_launch(out, x, codes, scales, offsets, bias).run()
    return out


_FP8_MAX = tl.constexpr(FP8_MAX)
_ROW_TILE = 4096  # numbers of a row at a time


@triton.jit(do_not_specialize=CHANGING)
def _round_rows(  # type: ignore[no-untyped-def]
    out, scales, x, columns, x_row, TILE: tl.constexpr
):
    """A program quantises one row, which it reads twice, the second time out of a cache."""
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, TILE)
    from_, to = x + row * x_row, out + row * columns
    tops = tl.zeros([TILE], tl.float32)
    for first in range(0, columns, TILE):
        at = first + each
        tops = tl.maximum(tops, tl.abs(tl.load(from_ + at, mask=at < columns, other=0.0).to(tl.float32)))
    most = tl.max(tops, 0)
    inverse = tl.where(most > 0, _FP8_MAX / most, 0.0)
    tl.store(scales + row, most / _FP8_MAX)
    for first in range(0, columns, TILE):
        at = first + each
        values = tl.load(from_ + at, mask=at < columns, other=0.0).to(tl.float32)
        tl.store(to + at, (values * inverse).to(out.dtype.element_ty), mask=at < columns)


def round_launch(out: Tensor, scales: Tensor, x: Tensor) -> Launch:
    """Returns how `round_rows` is launched for its outputs, float8_e4m3fn [n, K] and float32 [n, 1]."""
    rows, columns = x.shape
    check("x", x, rows, columns, dtypes=DTYPES)
    tile = min(_ROW_TILE, power_of_two(columns))
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
