"""Access to memory by address, in kernels, and words of 32 bits that processes share: who writes what, and
who then sees what else was written.

A store of a shared word has release order, a load acquire order: a process that has seen a word sees all that
its writer stored before it. On x86-64 every aligned load and store is so (Intel SDM, volume 3, 9.2.2), and
LLVM need only not move them; on Arm it takes ldar and stlr. One thing x86 does not give: a store may still be
under way when a later load is done. Code that must not read before its own store is seen takes `swap`, which
is a full barrier.
"""

import ctypes
from typing import Any

from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from kvloom.kernels.cpu.lanes.floats import call, operation, pointer
from kvloom.kernels.cpu.parallel import kernel

LINE = 64  # bytes of a cache line
_SPINS = 2000  # looks before the core is offered to others at each further one
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYBODY = 0, 1, 0x7FFFFFFF  # of words that processes share
_f32, _i32, _i64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_yield = types.ExternalFunction("sched_yield", types.int32())
_syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))


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


@njit(inline="never")
def aligned(scratch):  # type: ignore[no-untyped-def]
    """Returns the address of an array's first whole cache line. The array must be used after what lies there:
    numba frees it after its last use, and addresses are none."""
    return (scratch.ctypes.data + LINE - 1) // LINE * LINE


@njit(inline="never")
def rest(looks):  # type: ignore[no-untyped-def]
    """Is called between two looks of a wait. Returns whether there were so many that others got the core."""
    long = looks > _SPINS
    if long:
        _yield()
    return long


class SignalArguments(ctypes.Structure):
    """The arguments of a signal. word: the address, a multiple of 4. value: the number to store, or not to
    see; then what was found. spins: loads at most."""

    _fields_ = [("word", ctypes.c_int64), ("value", ctypes.c_int64), ("spins", ctypes.c_int64)]


@operation(types.int64, types.int64)
def acquire(builder: Any, word: Any) -> Any:
    """Loads a shared word."""
    return builder.zext(builder.load_atomic(pointer(builder, word, _i32), "acquire", 4), _i64)


@operation(types.void, types.int64, types.int64)
def release(builder: Any, word: Any, value: Any) -> Any:
    """Stores a shared word."""
    builder.store_atomic(builder.trunc(value, _i32), pointer(builder, word, _i32), "release", 4)


@operation(types.int64, types.int64, types.int64)
def exchange(builder: Any, word: Any, value: Any) -> Any:
    """Stores a shared word, and returns what was there. It is a full barrier."""
    narrow = builder.trunc(value, _i32)
    return builder.zext(builder.atomic_rmw("xchg", pointer(builder, word, _i32), narrow, "seq_cst"), _i64)


@operation(types.int64, types.int64)
def take(builder: Any, word: Any) -> Any:
    """Stores 1 and returns it if the word is 0; else returns 0."""
    zero, one = ir.Constant(_i32, 0), ir.Constant(_i32, 1)
    found = builder.cmpxchg(pointer(builder, word, _i32), zero, one, "seq_cst", "seq_cst")
    return builder.zext(builder.extract_value(found, 1), _i64)


@njit(inline="never")
def wake(futex, word):  # type: ignore[no-untyped-def]
    """Wakes all who sleep on it. futex: the system call's number."""
    _syscall(futex, word, _FUTEX_WAKE, _EVERYBODY, 0, 0, 0)


@njit(inline="never")
def sleep(futex, word, seen, limit):  # type: ignore[no-untyped-def]
    """Sleeps until `wake`, at most for `limit`, the address of a timespec; not at all if the word is another
    than `seen`. It may return early."""
    _syscall(futex, word, _FUTEX_WAIT, seen, limit, 0, 0)


@kernel(SignalArguments)
def look(pointer):  # type: ignore[no-untyped-def]
    """Loads the word, with acquire order, into `value`."""
    a = carray(pointer, 1)[0]
    a.value = acquire(a.word)


@kernel(SignalArguments)
def tell(pointer):  # type: ignore[no-untyped-def]
    """Stores `value` with release order."""
    a = carray(pointer, 1)[0]
    release(a.word, a.value)


@kernel(SignalArguments)
def swap(pointer):  # type: ignore[no-untyped-def]
    """Stores `value`, which then is what was there. No load after it is done before it."""
    a = carray(pointer, 1)[0]
    a.value = exchange(a.word, a.value)


@kernel(SignalArguments)
def try_take(pointer):  # type: ignore[no-untyped-def]
    """Stores 1 if the word is 0; `value` says whether it was."""
    a = carray(pointer, 1)[0]
    a.value = take(a.word)


@kernel(SignalArguments)
def spin(pointer):  # type: ignore[no-untyped-def]
    """Loads the word until it is not `value`, or `spins` times; `value` is then the last that was seen."""
    a = carray(pointer, 1)[0]
    found = acquire(a.word)
    turns = 0
    while found == a.value and turns < a.spins:
        turns += 1
        rest(turns)
        found = acquire(a.word)
    a.value = found
