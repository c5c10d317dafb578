"""Sixteen float32 lanes as a numba value: what the CPU kernels are written in.

LLVM splits a vector if registers are narrower, so one source serves SSE, AVX2, AVX-512 and NEON. Explicit
lanes spare LLVM's alias checks and need no compile-time head size. After a change here `__pycache__/*.nb?`
has to be removed, which `kernels/cpu/warm.py` does.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, Final

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, njit, types
from numba.extending import intrinsic, models, register_model


def has(feature: str) -> bool:
    """Returns whether numba compiles for processors with this feature."""
    if config.CPU_FEATURES is not None:
        return f"+{feature}" in str(config.CPU_FEATURES).split(",")
    return bool(llvm.get_host_cpu_features().get(feature, False))


HAS_HALF: Final = not llvm.get_process_triple().startswith(("x86_64", "i")) or has("f16c")
"""Whether a float16 becomes a float32 by an instruction, as it does on all but old x86."""


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
        typing.__name__ = typing.__qualname__ = emit.__name__
        return intrinsic(typing)

    return decorate


def variant(*parts: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a function that is made several times, with other parts each time, under a name that says
    which. numba tells functions of one name apart by the order in which a process has made them, and the
    linker takes the first of a name: kernels that two processes have compiled would call each other's."""

    def decorate(body: Callable[..., Any]) -> Any:
        names = [str(getattr(part, "__qualname__", part)) for part in parts]
        body.__qualname__ = "_".join([body.__qualname__, *names])
        return njit(inline="never")(body)

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


_half_lanes, _short_lanes = ir.VectorType(ir.HalfType(), LANES), ir.VectorType(ir.IntType(16), LANES)
_high_half = ir.Constant(_int_lanes, [16] * LANES)


@operation(float32x16, types.int64)
def load_bfloat16(builder: Any, address: Any) -> Any:
    """Loads 16 neighbours."""
    words = builder.zext(builder.load(pointer(builder, address, _short_lanes), align=2), _int_lanes)
    return builder.bitcast(builder.shl(words, _high_half), _lanes)


@operation(float32x16, types.int64)
def load_even_bfloat16(builder: Any, address: Any) -> Any:
    """Loads those of 32 neighbours whose number is even."""
    words = builder.load(pointer(builder, address, _int_lanes), align=4)
    return builder.bitcast(builder.shl(words, _high_half), _lanes)


@operation(float32x16, types.int64)
def load_odd_bfloat16(builder: Any, address: Any) -> Any:
    words = builder.load(pointer(builder, address, _int_lanes), align=4)
    return builder.bitcast(builder.and_(words, ir.Constant(_int_lanes, [0xFFFF0000] * LANES)), _lanes)


@operation(float32x16, types.int64)
def load_float16(builder: Any, address: Any) -> Any:
    """Loads 16 neighbours. Where HAS_HALF is False it is compiled, and must not be called: it loads zeros, as
    LLVM would call a function that nobody links."""
    if not HAS_HALF:
        return _constant(0.0)
    return builder.fpext(builder.load(pointer(builder, address, _half_lanes), align=2), _lanes)


@operation(types.float32, types.int64)
def read_bfloat16(builder: Any, address: Any) -> Any:
    word = builder.zext(builder.load(pointer(builder, address, ir.IntType(16)), align=2), _i32)
    return builder.bitcast(builder.shl(word, ir.Constant(_i32, 16)), _f32)


@operation(types.float32, types.int64)
def read_float16(builder: Any, address: Any) -> Any:
    """Loads one, under the same condition."""
    if not HAS_HALF:
        return ir.Constant(_f32, 0.0)
    return builder.fpext(builder.load(pointer(builder, address, ir.HalfType()), align=2), _f32)


_QUIET: Final = 0x7FC0  # a bfloat16 that is no number


def _rounded(builder: Any, value: Any, ints: Any, shorts: Any) -> Any:
    """Emits the rounding of float32 to bfloat16, to nearest, ties to even."""

    def constant(number: int) -> Any:
        return ir.Constant(ints, [number] * LANES) if isinstance(ints, ir.VectorType) else ints(number)

    bits = builder.bitcast(value, ints)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    half = builder.lshr(builder.add(bits, builder.add(odd, constant(0x7FFF))), constant(16))
    number = builder.fcmp_ordered("==", value, value)
    return builder.trunc(builder.select(number, half, constant(_QUIET)), shorts)


@operation(types.void, types.int64, float32x16)
def store_bfloat16(builder: Any, address: Any, value: Any) -> Any:
    short = _rounded(builder, value, _int_lanes, _short_lanes)
    builder.store(short, pointer(builder, address, _short_lanes), align=2)


@operation(types.void, types.int64, types.float32)
def write_bfloat16(builder: Any, address: Any, value: Any) -> Any:
    short = _rounded(builder, value, _i32, ir.IntType(16))
    builder.store(short, pointer(builder, address, short.type), align=2)


@operation(types.void, types.int64, float32x16)
def store(builder: Any, address: Any, value: Any) -> Any:
    builder.store(value, pointer(builder, address, _lanes), align=4)


@operation(float32x16, types.float32)
def splat(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(_lanes, ir.Undefined), value, ir.Constant(_i32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(_int_lanes, [0] * LANES))


@operation(float32x16)
def ramp(builder: Any) -> Any:
    """Returns 0, 1, 2, and so on."""
    return ir.Constant(_lanes, [float(i) for i in range(LANES)])


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


@operation(float32x16, float32x16)
def magnitudes(builder: Any, a: Any) -> Any:
    return call(builder, f"llvm.fabs.v{LANES}f32", _lanes, a)


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
