"""Sixteen float32 lanes as a numba value: what the CPU kernels are written in.

LLVM splits a vector if registers are narrower, so one source serves SSE, AVX2, AVX-512 and NEON. Explicit
lanes spare LLVM's alias checks and need no compile-time head size. After a change here `__pycache__/*.nb?`
has to be removed, which `kernels/cpu/warm.py` does.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model


def operation(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes an intrinsic of a function from an IR builder and IR values to an IR value."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            value = emit(builder, *values)
            return context.get_dummy_value() if result is types.void else value

        def typing(context: Any, *values: Any) -> Any:
            return result(*arguments), generate

        # numba counts the parameters of this function
        names = ["context", *(f"a{i}" for i in range(len(arguments)))]
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        vars(typing)["__signature__"] = Signature(parameters)
        return intrinsic(typing)

    return decorate


def call(builder: Any, name: str, result: Any, *values: Any) -> Any:
    function = builder.module.declare_intrinsic(name, fnty=ir.FunctionType(result, [v.type for v in values]))
    return builder.call(function, values)


def pointer(builder: Any, address: Any, to: Any) -> Any:
    return builder.inttoptr(address, to.as_pointer())


LANES = 16

_f32, _i32 = ir.FloatType(), ir.IntType(32)
_lanes, _int_lanes = ir.VectorType(_f32, LANES), ir.VectorType(_i32, LANES)


class Float32x16(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="float32x16")


float32x16 = Float32x16()


@register_model(Float32x16)
class _Float32x16Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, of: Any) -> None:
        super().__init__(manager, of, _lanes)


def _constant(value: float) -> Any:
    return ir.Constant(_lanes, [value] * LANES)


@operation(float32x16, types.int64)
def load(builder: Any, address: Any) -> Any:
    return builder.load(pointer(builder, address, _lanes), align=4)


@operation(types.void, types.int64, float32x16)
def store(builder: Any, address: Any, value: Any) -> Any:
    builder.store(value, pointer(builder, address, _lanes), align=4)


@operation(float32x16, types.float32)
def splat(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(_lanes, ir.Undefined), value, ir.Constant(_i32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(_int_lanes, [0] * LANES))


@operation(float32x16, float32x16, float32x16)
def add(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


@operation(float32x16, float32x16, float32x16)
def subtract(builder: Any, a: Any, b: Any) -> Any:
    return builder.fsub(a, b)


@operation(float32x16, float32x16, float32x16)
def multiply(builder: Any, a: Any, b: Any) -> Any:
    return builder.fmul(a, b)


@operation(float32x16, float32x16, float32x16)
def divide(builder: Any, a: Any, b: Any) -> Any:
    return builder.fdiv(a, b)


@operation(float32x16, float32x16, float32x16, float32x16)
def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call(builder, f"llvm.fma.v{LANES}f32", _lanes, a, b, c)


@operation(float32x16, float32x16, float32x16)
def maximum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _halves(builder: Any, a: Any) -> tuple[Any, Any]:
    half = a.type.count // 2
    mask = ir.VectorType(_i32, half)
    low = builder.shuffle_vector(a, a, ir.Constant(mask, list(range(half))))
    return low, builder.shuffle_vector(a, a, ir.Constant(mask, list(range(half, 2 * half))))


@operation(types.float32, float32x16)
def total(builder: Any, a: Any) -> Any:
    while a.type.count > 1:
        a = builder.fadd(*_halves(builder, a))
    return builder.extract_element(a, ir.Constant(_i32, 0))


@operation(types.float32, float32x16)
def first(builder: Any, a: Any) -> Any:
    return builder.extract_element(a, ir.Constant(_i32, 0))


@operation(types.float32, float32x16)
def largest(builder: Any, a: Any) -> Any:
    while a.type.count > 1:
        low, high = _halves(builder, a)
        a = builder.select(builder.fcmp_ordered(">", low, high), low, high)
    return builder.extract_element(a, ir.Constant(_i32, 0))


@operation(types.void, types.int64, *[float32x16] * 4)
def store_totals(builder: Any, address: Any, *rows: Any) -> Any:
    """Stores the totals of four vectors side by side: they share the last, narrow steps."""
    quarters = []
    for row in rows:
        half = builder.fadd(*_halves(builder, row))
        quarters.append(builder.fadd(*_halves(builder, half)))
    four = ir.VectorType(_i32, 4)
    even, odd = ir.Constant(four, [0, 2, 4, 6]), ir.Constant(four, [1, 3, 5, 7])

    def pairs(a: Any, b: Any) -> Any:
        return builder.fadd(builder.shuffle_vector(a, b, even), builder.shuffle_vector(a, b, odd))

    totals = pairs(pairs(quarters[0], quarters[1]), pairs(quarters[2], quarters[3]))
    builder.store(totals, pointer(builder, address, ir.VectorType(_f32, 4)), align=4)


def _polynomial(builder: Any, x: Any, coefficients: tuple[float, ...]) -> Any:
    value = _constant(coefficients[0])
    for c in coefficients[1:]:
        value = call(builder, f"llvm.fma.v{LANES}f32", _lanes, value, x, _constant(c))
    return value


def _exponential(builder: Any, x: Any) -> Any:
    """Computes Cephes' expf, to about 1e-7: x = n ln 2 + r with |r| <= ln 2 / 2, e^x = 2^n p(r)."""

    def fma(*values: Any) -> Any:
        return call(builder, f"llvm.fma.v{LANES}f32", _lanes, *values)

    low, high = _constant(-87.3), _constant(88.3)
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
    n = call(builder, f"llvm.rint.v{LANES}f32", _lanes, builder.fmul(x, _constant(1.44269504088896341)))
    r = fma(n, _constant(-0.693359375), x)
    r = fma(n, _constant(2.12194440e-4), r)
    p = _polynomial(
        builder,
        r,
        (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5),
    )
    p = builder.fadd(fma(builder.fmul(r, r), p, r), _constant(1.0))
    exponent = builder.add(builder.fptosi(n, _int_lanes), ir.Constant(_int_lanes, [127] * LANES))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(_int_lanes, [23] * LANES)), _lanes)
    return builder.fmul(p, power)


@operation(float32x16, float32x16)
def exponential(builder: Any, x: Any) -> Any:
    return _exponential(builder, x)


@operation(float32x16, float32x16)
def tanh(builder: Any, x: Any) -> Any:
    """Computes Cephes' tanhf: an odd polynomial near zero, at which 1 - 2 / (e^2x + 1) would cancel."""
    square = builder.fmul(x, x)
    near = _polynomial(
        builder,
        square,
        (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1),
    )
    near = call(builder, f"llvm.fma.v{LANES}f32", _lanes, builder.fmul(square, x), near, x)
    doubled = builder.fadd(_exponential(builder, builder.fadd(x, x)), _constant(1.0))
    far = builder.fsub(_constant(1.0), builder.fdiv(_constant(2.0), doubled))
    return builder.select(builder.fcmp_ordered("<", square, _constant(0.625**2)), near, far)
