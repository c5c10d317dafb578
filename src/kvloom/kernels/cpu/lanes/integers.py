"""Sixteen int32 lanes as a numba value: what kernels over weights of few bits are written in.

A lane also stands for four bytes, the codes of four inputs, or for a pair of bfloat16. Where the processor
has VNNI, products of bytes are one instruction; elsewhere they are widened and multiplied by plain
operations, which LLVM lowers for any processor. Both give the same integers.
"""

from __future__ import annotations

from typing import Any, Final

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import models, register_model

from kvloom.kernels.cpu.lanes.floats import LANES, call, float32x16, has, operation, pointer

_i8, _i16, _i32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_floats, _ints = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_i32, LANES)
_bytes, _shorts = ir.VectorType(_i8, 4 * LANES), ir.VectorType(_i16, 2 * LANES)
_few_bytes = ir.VectorType(_i8, LANES)

HAS_VNNI: Final = has("avx512vnni")
HAS_BFLOAT16_DOT: Final = has("avx512bf16")


class Int32x16(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="int32x16")


int32x16 = Int32x16()


@register_model(Int32x16)
class _Int32x16Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, of: Any) -> None:
        super().__init__(manager, of, _ints)


def _all(value: int, of: Any = _ints) -> Any:
    return ir.Constant(of, [value] * of.count)


def _spread(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(_ints, ir.Undefined), value, ir.Constant(_i32, 0))
    return builder.shuffle_vector(one, one, _all(0))


@operation(int32x16, types.int64)
def load_ints(builder: Any, address: Any) -> Any:
    return builder.load(pointer(builder, address, _ints), align=4)


@operation(int32x16, types.int64)
def load_bytes(builder: Any, address: Any) -> Any:
    """Loads 16 neighbours, bytes from -128 to 127."""
    return builder.sext(builder.load(pointer(builder, address, _few_bytes), align=1), _ints)


@operation(int32x16, types.int64)
def splat_int(builder: Any, value: Any) -> Any:
    return _spread(builder, builder.trunc(value, _i32))


@operation(int32x16, types.int64)
def load_splat(builder: Any, address: Any) -> Any:
    """Returns the four bytes at the address in every lane."""
    return _spread(builder, builder.load(pointer(builder, address, _i32), align=4))


@operation(int32x16, int32x16, int32x16)
def add_ints(builder: Any, a: Any, b: Any) -> Any:
    return builder.add(a, b)


@operation(int32x16, int32x16, int32x16)
def subtract_ints(builder: Any, a: Any, b: Any) -> Any:
    return builder.sub(a, b)


@operation(int32x16, int32x16)
def low_halves(builder: Any, a: Any) -> Any:
    """Returns the low four bits of each byte."""
    return builder.and_(a, _all(0x0F0F0F0F))


@operation(int32x16, int32x16)
def high_halves(builder: Any, a: Any) -> Any:
    return builder.and_(builder.lshr(a, _all(4)), _all(0x0F0F0F0F))


@operation(int32x16, int32x16)
def raised_halves(builder: Any, a: Any) -> Any:
    """Returns 16 times the high four bits of each byte."""
    return builder.and_(a, ir.Constant(_ints, [0xF0F0F0F0] * LANES))


@operation(int32x16, int32x16)
def low_six(builder: Any, a: Any) -> Any:
    """Returns the low six bits of each byte."""
    return builder.and_(a, _all(0x3F3F3F3F))


@operation(int32x16, int32x16, int32x16, int32x16)
def high_pairs(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Returns the high two bits of each byte of a, b and c side by side, those of c lowest."""
    places = (a, 2, 0x30303030), (b, 4, 0x0C0C0C0C), (c, 6, 0x03030303)
    pairs = [builder.and_(builder.lshr(one, _all(shift)), _all(mask)) for one, shift, mask in places]
    return builder.or_(builder.or_(pairs[0], pairs[1]), pairs[2])


@operation(int32x16, int32x16)
def sixteenths(builder: Any, a: Any) -> Any:
    return builder.ashr(a, _all(4))


@operation(int32x16, int32x16, types.int64)
def byte_of(builder: Any, a: Any, index: Any) -> Any:
    """Returns one byte of each lane, from 0 to 255."""
    shift = _spread(builder, builder.trunc(builder.shl(index, ir.Constant(index.type, 3)), _i32))
    return builder.and_(builder.lshr(a, shift), _all(0xFF))


@operation(float32x16, int32x16)
def to_floats(builder: Any, a: Any) -> Any:
    return builder.sitofp(a, _floats)


@operation(int32x16, float32x16)
def rounded(builder: Any, a: Any) -> Any:
    """Returns the nearest integers, the even ones of two."""
    return builder.fptosi(call(builder, f"llvm.rint.v{LANES}f32", _floats, a), _ints)


@operation(types.void, types.int64, int32x16)
def store_bytes(builder: Any, address: Any, a: Any) -> Any:
    """Stores the lowest byte of each lane, side by side."""
    builder.store(builder.trunc(a, _few_bytes), pointer(builder, address, _few_bytes), align=4)


@operation(types.int64, int32x16)
def total_int(builder: Any, a: Any) -> Any:
    while a.type.count > 1:
        half = a.type.count // 2
        mask = ir.VectorType(_i32, half)
        low = builder.shuffle_vector(a, a, ir.Constant(mask, list(range(half))))
        a = builder.add(low, builder.shuffle_vector(a, a, ir.Constant(mask, list(range(half, 2 * half)))))
    return builder.sext(builder.extract_element(a, ir.Constant(_i32, 0)), ir.IntType(64))


@operation(types.void, types.int64, types.int64)
def write_int(builder: Any, address: Any, value: Any) -> Any:
    builder.store(builder.trunc(value, _i32), pointer(builder, address, _i32), align=4)


def _widened(builder: Any, sums: Any, codes: Any, values: Any) -> Any:
    """Returns what `dot` does, in the form that LLVM turns into pmaddwd on x86."""
    codes, values = builder.bitcast(codes, _shorts), builder.bitcast(values, _shorts)
    eight, low = _all(8, _shorts), _all(0xFF, _shorts)
    parts = (
        (builder.and_(codes, low), builder.ashr(builder.shl(values, eight), eight)),
        (builder.lshr(codes, eight), builder.ashr(values, eight)),
    )
    for a, b in parts:
        products = []
        for odd in (0, 1):
            places = ir.Constant(_ints, list(range(odd, 2 * LANES, 2)))
            wide = [builder.sext(builder.shuffle_vector(one, one, places), _ints) for one in (a, b)]
            products.append(builder.mul(*wide))
        sums = builder.add(sums, builder.add(*products))
    return sums


@operation(int32x16, int32x16, int32x16, int32x16)
def dot(builder: Any, sums: Any, codes: Any, values: Any) -> Any:
    """Returns sums + the sum over each lane's four bytes of codes · values; codes are unsigned, values
    signed. Intel's VPDPBUSD (Software Developer's Manual, volume 2)."""
    if not HAS_VNNI:
        return _widened(builder, sums, codes, values)
    if llvm.llvm_version_info[0] >= 22:  # whose intrinsic takes bytes
        codes, values = builder.bitcast(codes, _bytes), builder.bitcast(values, _bytes)
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", _ints, sums, codes, values)


def _wide_pair(builder: Any, pairs: Any) -> tuple[Any, Any]:
    first = builder.shl(pairs, _all(16))
    return builder.bitcast(first, _floats), builder.bitcast(builder.and_(pairs, _all(0xFFFF0000)), _floats)


@operation(float32x16, float32x16, int32x16, int32x16)
def dot_bfloat16(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    """Returns sums + the sum over each lane's two bfloat16 of a · b, in float32. Intel's VDPBF16PS (Software
    Developer's Manual, volume 2), which takes subnormal numbers for zeros; where it lacks, two exact products
    one after the other."""
    if HAS_BFLOAT16_DOT:
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _floats, sums, a, b)
    for x, y in zip(_wide_pair(builder, a), _wide_pair(builder, b), strict=True):
        sums = call(builder, f"llvm.fma.v{LANES}f32", _floats, x, y, sums)
    return sums
