"""The rows of K and V in the pool, as kernels read and write them: a token's numbers in one KV head, in one
of the number formats that there are for them (`kvloom.types.geometry`).

Everything but the rows is float32: bfloat16 is widened by a shift; a number of int8 is a code between -127
and 127, and a row's scale, the largest magnitude / 127, stands behind its codes, at a multiple of 4 bytes.
Both are rounded to nearest, ties to even. A row depends on its own numbers alone, so it is the same in
whatever batch it was computed.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types

from kvloom.kernels.cpu.half import round_row
from kvloom.kernels.cpu.lanes.floats import (
    LANES,
    add,
    call,
    float32x16,
    largest,
    load,
    magnitudes,
    maximum,
    multiply,
    operation,
    pointer,
    splat,
    total,
)
from kvloom.kernels.cpu.memory import read, write

FLOAT32, BFLOAT16, INT8 = 0, 1, 2  # number formats of K and V; those of weights are in `half.py`
KINDS: Final = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.int8: INT8}
SCALE = 4  # bytes of a row's scale, a float32
_LEAST = np.float32(1e-30)  # the largest magnitude of a row that is not all zeros; 127 / it is finite
_MOST = np.float32(127)

_f32, _i8, _i32 = ir.FloatType(), ir.IntType(8), ir.IntType(32)
_lanes = ir.VectorType(_f32, LANES)
_bytes, _ints = (ir.VectorType(one, LANES) for one in (_i8, _i32))


@operation(float32x16, types.int64)
def load_int8(builder: Any, address: Any) -> Any:
    """Loads 16 codes as float32; so does `read_int8` one."""
    codes = builder.load(pointer(builder, address, _bytes), align=1)
    return builder.sitofp(builder.sext(codes, _ints), _lanes)


@operation(types.void, types.int64, float32x16)
def store_int8(builder: Any, address: Any, value: Any) -> Any:
    """Stores 16 numbers rounded to codes; so does `write_int8` one."""
    whole = builder.fptosi(call(builder, f"llvm.rint.v{LANES}f32", _lanes, value), _ints)
    builder.store(builder.trunc(whole, _bytes), pointer(builder, address, _bytes), align=1)


@operation(types.float32, types.int64)
def read_int8(builder: Any, address: Any) -> Any:
    return builder.sitofp(builder.load(pointer(builder, address, _i8), align=1), _f32)


@operation(types.void, types.int64, types.float32)
def write_int8(builder: Any, address: Any, value: Any) -> Any:
    whole = builder.fptosi(call(builder, "llvm.rint.f32", _f32, value), _i32)
    builder.store(builder.trunc(whole, _i8), pointer(builder, address, _i8), align=1)


@njit(inline="never")
def _quantize_row(to, source, row, dim):  # type: ignore[no-untyped-def]
    """Writes codes and scale. A row with a number that is not finite gets codes of 0 and a scale that is no
    number, so that whoever reads it computes none either."""
    whole = dim // LANES * LANES
    most = poison = splat(np.float32(0))
    for i in range(0, whole, LANES):
        x = load(source + i * 4)
        most, poison = maximum(magnitudes(x), most), add(poison, multiply(x, splat(np.float32(0))))
    bound, strange = largest(most), total(poison)
    for i in range(whole, dim):
        x = read(source + i * 4)
        bound, strange = max(bound, abs(x)), strange + x * np.float32(0)
    inverse = scale = np.float32(0)
    if strange != np.float32(0):
        scale = np.float32(np.nan)
    elif bound > _LEAST:
        inverse, scale = _MOST / bound, bound / _MOST
    factor = splat(inverse)
    for i in range(0, whole, LANES):
        x = multiply(load(source + i * 4), factor) if inverse > np.float32(0) else factor
        store_int8(to + i, x)
    for i in range(whole, dim):
        write_int8(to + i, read(source + i * 4) * inverse if inverse > np.float32(0) else inverse)
    for i in range(dim, row - SCALE):
        write_int8(to + i, np.float32(0))
    write(to + row - SCALE, scale)


@njit(inline="never")
def narrow_row(to, source, dim, row, kind):  # type: ignore[no-untyped-def]
    """Writes the `dim` float32 at `source` as a row of `row` bytes in a format that is narrower."""
    if kind == BFLOAT16:
        round_row(to, source, dim)
    else:
        _quantize_row(to, source, row, dim)
