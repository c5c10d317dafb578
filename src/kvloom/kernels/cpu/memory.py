"""Access to memory by address, in kernels."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvloom.kernels.cpu.vector import call, operation, pointer

_f32, _i32, _i64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


@intrinsic  # type: ignore[untyped-decorator]
def address_of(context: Any, pointer: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.ptrtoint(values[0], _i64)

    return types.int64(pointer), generate


@operation(types.float32, types.int64)
def read(builder: Any, address: Any) -> Any:
    return builder.load(pointer(builder, address, _f32), align=4)


@operation(types.void, types.int64, types.float32)
def write(builder: Any, address: Any, value: Any) -> Any:
    builder.store(value, pointer(builder, address, _f32), align=4)


@operation(types.int64, types.int64)
def read_int(builder: Any, address: Any) -> Any:
    return builder.sext(builder.load(pointer(builder, address, _i32), align=4), _i64)


@operation(types.float64, types.int64)
def read_double(builder: Any, address: Any) -> Any:
    return builder.load(pointer(builder, address, ir.DoubleType()), align=8)


@operation(types.int64, types.int64, types.int64)
def fetch_add(builder: Any, address: Any, value: Any) -> Any:
    """Adds to a number. What was written before is seen by whoever adds, or observes, later."""
    return builder.atomic_rmw("add", pointer(builder, address, _i64), value, "acq_rel")


@operation(types.int64, types.int64)
def observe(builder: Any, address: Any) -> Any:
    """Returns the number that others add to."""
    return builder.load_atomic(pointer(builder, address, _i64), "acquire", 8)


@operation(types.voidptr, types.int64)
def pointer_at(builder: Any, address: Any) -> Any:
    return pointer(builder, address, ir.IntType(8))


@operation(types.void, types.int64)
def prefetch(builder: Any, address: Any) -> Any:
    place = pointer(builder, address, ir.IntType(8))
    read_only, to_second_level, data = ir.Constant(_i32, 0), ir.Constant(_i32, 2), ir.Constant(_i32, 1)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), place, read_only, to_second_level, data)
