"""Copies K and V between two arenas at memory's speed, without the GIL.

Whole blocks are stored past the caches, which saves reading the target first and leaves the caches to whoever
computes meanwhile; four quarters of a block go side by side, and the next block is fetched meanwhile, because
scattered blocks end the hardware's own streams every 16 KiB (a plain memcpy a block reaches 60 % of one large
memcpy's rate on a Zen 4, this 110 %).
"""

import ctypes
from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from kvloom.kernels.cpu.lanes.floats import LANES, float32x16, load
from kvloom.kernels.cpu.memory import prefetch, read_int
from kvloom.kernels.cpu.parallel import kernel
from kvloom.types.geometry import I32, AnyArray

_LINE = LANES * 4
_QUARTERS = 4


@intrinsic  # type: ignore[untyped-decorator]
def _stream(context: Any, address: Any, value: Any) -> Any:
    """Stores 64 bytes, at a multiple of 64, past the caches."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], values[1].type.as_pointer())
        stored = builder.store(values[1], pointer, align=_LINE)
        one = ir.Constant(ir.IntType(32), 1)
        stored.set_metadata("nontemporal", builder.module.add_metadata([one]))
        return context.get_dummy_value()

    return types.void(types.int64, float32x16), generate


@intrinsic  # type: ignore[untyped-decorator]
def _fence(context: Any) -> Any:
    """Orders what was streamed before all later stores: whoever sees one of those sees it."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def _memcpy(context: Any, to: Any, source: Any, size: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(64)
        copy = builder.module.declare_intrinsic("llvm.memcpy", [pointer, pointer, word])
        to, source = (builder.inttoptr(value, pointer) for value in values[:2])
        builder.call(copy, [to, source, values[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


class _CopyArguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "source", "target", "block_bytes", "page_tokens")),
        *((name, ctypes.c_int64) for name in ("token_bytes", "own", "peer", "offsets", "counts")),
    ]


@kernel(_CopyArguments)
def _copy(pointer):  # type: ignore[no-untyped-def]
    a = carray(pointer, 1)[0]
    half, quarter = a.page_tokens * a.token_bytes, a.block_bytes // _QUARTERS
    streamed = a.block_bytes % (_QUARTERS * _LINE) == 0 and a.target % _LINE == 0
    for i in range(a.rows):
        source = a.source + read_int(a.own + i * 4) * a.block_bytes
        to = a.target + read_int(a.peer + i * 4) * a.block_bytes
        at, size = read_int(a.offsets + i * 4) * a.token_bytes, read_int(a.counts + i * 4) * a.token_bytes
        if size < half:
            _memcpy(to + at, source + at, size)
            _memcpy(to + half + at, source + half + at, size)
        elif streamed:
            following = a.source + read_int(a.own + min(i + 1, a.rows - 1) * 4) * a.block_bytes
            for j in range(0, quarter, _LINE):
                for k in range(_QUARTERS):
                    prefetch(following + k * quarter + j)
                    _stream(to + k * quarter + j, load(source + k * quarter + j))
        else:
            _memcpy(to, source, a.block_bytes)
    _fence()


def copy_blocks(
    source: AnyArray,
    target: AnyArray,
    own: I32,
    peer: I32,
    offsets: I32,
    counts: I32,
    *,
    block_bytes: int,
    page_tokens: int,
    token_bytes: int,
) -> None:
    """Copies for each i tokens [offsets[i], offsets[i] + counts[i]) of K and of V from block own[i] of
    `source` to block peer[i] of `target`, both flat bytes; blocks are [2, page_tokens, token_bytes], of which
    all tokens take the bytes past them along. The four arrays are [n]; that they fit is the caller's to see
    to."""
    arrays = own, peer, offsets, counts
    if any(a.dtype != "int32" or not a.flags.c_contiguous or a.shape != (len(own),) for a in arrays):
        raise ValueError(f"own, peer, offsets, counts: want contiguous int32 [{len(own)}]")
    if 2 * page_tokens * token_bytes > block_bytes:
        raise ValueError(f"{page_tokens} tokens of 2 x {token_bytes} bytes do not fit {block_bytes} bytes")
    addresses = [a.ctypes.data for a in arrays]
    source_at, target_at = source.ctypes.data, target.ctypes.data
    _copy(
        _CopyArguments(len(own), source_at, target_at, block_bytes, page_tokens, token_bytes, *addresses),
        1,
    )
