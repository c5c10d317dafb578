"""Computes what a draw needs of one token, or of sixteen: its noise, its mass, and which comes first.

What is of one token (all that is no vector) has the bits of `kernels/draw_reference.py`: no product is fused
with a sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from kvloom.kernels.cpu.lanes.floats import LANES, call, float32x16, operation
from kvloom.kernels.draw_reference import (
    BLOCK,
    EXP_TERMS,
    FIRST_FACTOR,
    GOLDEN,
    HALF_ROOT,
    LOG_2,
    LOG_TERMS,
    MASS_BITS,
    NO_MASS,
    PER_LOG_2,
    SECOND_FACTOR,
)

# the polynomial for 2^f, |f| <= 1/2, whose largest relative error, 8e-8, is the least of its degree (Remez)
_POWER_TERMS = (0.0013276472, 0.00967554133, 0.0555071327, 0.240221197, 0.693146967, 1.00000007)
_l0, _l1, _l2, _l3, _l4, _l5, _l6, _l7, _l8, _l9, _l10 = LOG_TERMS
_e0, _e1, _e2, _e3, _e4, _e5, _e6, _e7, _e8, _e9, _e10 = EXP_TERMS


@operation(types.int64, types.float64)
def _bits(builder: Any, value: Any) -> Any:
    return builder.bitcast(value, ir.IntType(64))


@operation(types.float64, types.int64)
def _double(builder: Any, bits: Any) -> Any:
    return builder.bitcast(bits, ir.DoubleType())


@operation(types.int64, types.float32)
def _narrow_bits(builder: Any, value: Any) -> Any:
    return builder.sext(builder.bitcast(value, ir.IntType(32)), ir.IntType(64))


@operation(types.int64, types.int64, types.int64)
def _shifted(builder: Any, value: Any, by: Any) -> Any:
    return builder.lshr(value, by)


@operation(float32x16, float32x16)
def power(builder: Any, x: Any) -> Any:
    """Computes 2^x for x up to 0, to about 1e-7: x = n + f with |f| <= 1/2. What is less than 2^-126 becomes
    that."""

    def constant(value: float) -> Any:
        return ir.Constant(x.type, [value] * LANES)

    low, whole = constant(-126.0), constant(1.5 * 2.0**23)  # a sum with this is rounded to an integer
    x = builder.select(builder.fcmp_ordered(">", x, low), x, low)
    n = builder.fadd(x, whole)
    f = builder.fsub(x, builder.fsub(n, whole))
    p = constant(_POWER_TERMS[0])
    for term in _POWER_TERMS[1:]:
        p = call(builder, f"llvm.fma.v{LANES}f32", x.type, p, f, constant(term))
    bits = ir.VectorType(ir.IntType(32), LANES)
    exponent = builder.shl(builder.bitcast(n, bits), ir.Constant(bits, [23] * LANES))
    return builder.bitcast(builder.add(builder.bitcast(p, bits), exponent), x.type)


@operation(float32x16, float32x16, float32x16, float32x16)
def above(builder: Any, x: Any, edge: Any, value: Any) -> Any:
    """Returns `value` in the lanes in which x > edge, and 0 in the others."""
    return builder.select(builder.fcmp_ordered(">", x, edge), value, ir.Constant(value.type, [0.0] * LANES))


@operation(float32x16, float32x16, float32x16, float32x16)
def not_below(builder: Any, x: Any, edge: Any, value: Any) -> Any:
    """Returns `value` in the lanes in which x >= edge, and 0 in the others."""
    return builder.select(builder.fcmp_ordered(">=", x, edge), value, ir.Constant(value.type, [0.0] * LANES))


@operation(types.int64, float32x16, float32x16)
def which(builder: Any, x: Any, least: Any) -> Any:
    """Returns as bits of a word which lanes are not below `least`."""
    bits = builder.bitcast(builder.fcmp_ordered(">=", x, least), ir.IntType(LANES))
    return builder.zext(bits, ir.IntType(64))


@operation(types.int64, types.int64)
def lowest_bit(builder: Any, word: Any) -> Any:
    """Returns the place of the lowest bit of a word that has one."""
    return builder.cttz(word, ir.Constant(ir.IntType(1), 1))


@njit(error_model="numpy")
def logarithm(x):  # type: ignore[no-untyped-def]
    """Computes `draw_reference.logarithm` of one number."""
    bits = _bits(x)
    n = (bits - HALF_ROOT) >> 52
    m = _double(bits - (n << 52))
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = ((((_l0 * z + _l1) * z + _l2) * z + _l3) * z + _l4) * z + _l5
    p = ((((p * z + _l6) * z + _l7) * z + _l8) * z + _l9) * z + _l10
    return n * LOG_2 + s * p


@njit(error_model="numpy")
def mass_of(y):  # type: ignore[no-untyped-def]
    """Computes `draw_reference.masses` of one number."""
    y = y if y > NO_MASS else NO_MASS
    n = np.int64(y * PER_LOG_2 - 0.5)
    r = y - n * LOG_2
    p = ((((_e0 * r + _e1) * r + _e2) * r + _e3) * r + _e4) * r + _e5
    p = ((((p * r + _e6) * r + _e7) * r + _e8) * r + _e9) * r + _e10
    return np.int64(p * _double((n + (1023 + MASS_BITS)) << 52))


@njit(error_model="numpy")
def number(stream, counter):  # type: ignore[no-untyped-def]
    """Returns the 64 random bits of a stream at a counter (SplitMix64)."""
    z = stream + (counter + 1) * GOLDEN
    z = (z ^ _shifted(z, 30)) * FIRST_FACTOR
    z = (z ^ _shifted(z, 27)) * SECOND_FACTOR
    return z ^ _shifted(z, 31)


@njit(error_model="numpy")
def variate(bits):  # type: ignore[no-untyped-def]
    """Returns the exponential variate that the upper 52 of these bits make."""
    return -logarithm((_shifted(bits, 12) + 0.5) * 2.0**-52)


@njit(error_model="numpy")
def key_of(x):  # type: ignore[no-untyped-def]
    """Returns an integer from 0 to 2^32 - 1 that is ordered as float32 are; equal for both zeros."""
    bits = _narrow_bits(x + np.float32(0.0))
    return (1 << 31) + (bits ^ 0x7FFFFFFF if bits < 0 else bits)


@njit(error_model="numpy")
def least_variate(stream, block):  # type: ignore[no-untyped-def]
    """Returns the least exponential variate of a block, and its place."""
    bits = number(stream, -2 - block)
    return variate(bits) * (1 / BLOCK), bits & (BLOCK - 1)


@njit(error_model="numpy")
def noise(stream, token, least, place, most):  # type: ignore[no-untyped-def]
    """Returns a token's Gumbel noise. least, place: of its block, by `least_variate`; most: the block's
    largest noise."""
    if token & (BLOCK - 1) == place:
        return most
    return min(-logarithm(least + variate(number(stream, token))), most)
