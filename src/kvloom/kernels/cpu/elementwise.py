"""The kernels of a layer around its matrix products on a CPU: K and V are written into pages, rows normalised
and rotated.

Rows are handed out in chunks, and only enough rows to pay for waking a team are worth more than one thread.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from kvloom.kernels.cpu.kv_rows import FLOAT32, KINDS, narrow_row
from kvloom.kernels.cpu.lanes.floats import (
    LANES,
    add,
    load,
    multiply,
    multiply_add,
    splat,
    store,
    subtract,
    total,
)
from kvloom.kernels.cpu.memory import address_of, fetch_add, read, read_int, write
from kvloom.kernels.cpu.parallel import kernel
from kvloom.kernels.reference import check, row_width


@njit(inline="never")
def copy_row(to, source, size):  # type: ignore[no-untyped-def]
    """Copies `size` bytes."""
    whole = size // (LANES * 4) * LANES * 4
    for i in range(0, whole, LANES * 4):
        store(to + i, load(source + i))
    for i in range(whole, size, 4):
        write(to + i, read(source + i))


@njit(inline="never")
def norm_row(out, x, weight, size, eps, offset):  # type: ignore[no-untyped-def]
    """Computes out = x / rms(x) · (offset + weight), `size` values each; out may be x."""
    row = size * 4
    pairs, whole = row // (LANES * 8) * LANES * 8, row // (LANES * 4) * LANES * 4
    even = odd = splat(0.0)
    for i in range(0, pairs, LANES * 8):
        p, q = load(x + i), load(x + i + LANES * 4)
        even, odd = multiply_add(p, p, even), multiply_add(q, q, odd)
    for i in range(pairs, whole, LANES * 4):
        even = multiply_add(load(x + i), load(x + i), even)
    squares = total(add(even, odd))
    for i in range(whole, row, 4):
        squares += read(x + i) * read(x + i)
    inverse = np.float32(1.0 / np.sqrt(squares / size + eps))
    for i in range(0, whole, LANES * 4):
        normal = multiply(load(x + i), splat(inverse))
        store(out + i, multiply(add(splat(offset), load(weight + i)), normal))
    for i in range(whole, row, 4):
        write(out + i, (np.float32(offset) + read(weight + i)) * (read(x + i) * inverse))


@njit(inline="never")
def rotate_row(x, cos, sin, size):  # type: ignore[no-untyped-def]
    """Rotates the first `size` values of a head in place; i pairs with size/2 + i."""
    half = size * 2
    whole = half // (LANES * 4) * LANES * 4
    high = x + half
    for i in range(0, whole, LANES * 4):
        p, q = load(x + i), load(high + i)
        turned = multiply(q, load(sin + i))
        store(x + i, subtract(multiply(p, load(cos + i)), turned))
        turned = multiply(p, load(sin + half + i))
        store(high + i, multiply_add(q, load(cos + half + i), turned))
    for i in range(whole, half, 4):
        u, w = read(x + i), read(high + i)
        write(x + i, u * read(cos + i) - w * read(sin + i))
        write(high + i, w * read(cos + half + i) + u * read(sin + half + i))


_SERIAL = 1 << 15  # values below which one thread is faster than waking a team


def _team(rows: int, row_values: int) -> tuple[int, int]:
    """Returns the threads for the call, and the rows that a thread takes at once."""
    if rows * row_values < _SERIAL:
        return 1, rows
    threads = torch.get_num_threads()
    return threads, max(1, rows // (threads * 4))


@njit(inline="never")
def put_row(to, source, dim, row, kind):  # type: ignore[no-untyped-def]
    """Writes the `dim` float32 at `source` into the pool, as a row of `row` bytes in the format `kind`."""
    if kind == FLOAT32:
        copy_row(to, source, row)
    else:
        narrow_row(to, source, dim, row, kind)


class _WriteArguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("next", "chunk", "rows", "kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("row_bytes", "kind")),
        *((name, ctypes.c_int64) for name in ("k", "k_row", "k_head", "v", "v_row", "v_head")),
        *((name, ctypes.c_int64) for name in ("arena", "block_bytes", "page_tokens", "map", "map_page")),
        *((name, ctypes.c_int64) for name in ("slot_page", "slot_offset")),
    ]


@kernel(_WriteArguments)
def _write(pointer):  # type: ignore[no-untyped-def]
    a = carray(pointer, 1)[0]
    size = a.row_bytes
    start = fetch_add(address_of(pointer), a.chunk)
    while start < a.rows:
        for i in range(start, min(start + a.chunk, a.rows)):
            blocks = a.map + read_int(a.slot_page + i * 4) * a.map_page
            offset = read_int(a.slot_offset + i * 4) * size
            for head in range(a.kv_heads):
                to = a.arena + read_int(blocks + head * 4) * a.block_bytes + offset
                k, v = a.k + i * a.k_row + head * a.k_head, a.v + i * a.v_row + head * a.v_head
                put_row(to, k, a.head_dim, size, a.kind)
                put_row(to + a.page_tokens * size, v, a.head_dim, size, a.kind)
        start = fetch_add(address_of(pointer), a.chunk)


FLOAT, INT = (torch.float32,), (torch.int32,)


def check_pages(arena: Tensor, page_map: Tensor, layer: int, head_dim: int) -> int:
    """Returns the KV heads of page_map [pages, layers, kv_heads] int32, over arena [blocks, 2, T, D], whose
    last dimension is a row with its scale if it is of int8. Raises ValueError if they are not of these forms,
    or have no such layer."""
    blocks, _, tokens, _ = arena.shape
    pages, layers, kv_heads = page_map.shape
    width = row_width(head_dim, arena.dtype)
    check("arena", arena, blocks, 2, tokens, width, dtypes=tuple(KINDS))
    check("page_map", page_map, pages, layers, kv_heads, dtypes=INT)
    if not 0 <= layer < layers or not page_map.is_contiguous():
        raise ValueError(f"page_map {tuple(page_map.shape)}: want layer {layer} in it, and all contiguous")
    return kv_heads


def write_kv(
    arena: Tensor,
    page_map: Tensor,
    layer: int,
    k: Tensor,
    v: Tensor,
    slot_page: Tensor,
    slot_offset: Tensor,
) -> None:
    """Stores k, v [n, kv_heads, D] in arena [blocks, 2, T, D] at token slot_offset[i] of page slot_page[i].

    arena is float32, bfloat16 or int8 (see `check_pages`), k and v float32; page_map [pages, layers,
    kv_heads], slot_page [n] and slot_offset [n] int32. Rows of k and v may lie anywhere. No two slots may be
    the same.
    """
    rows, kv_heads, head_dim = k.shape
    map_heads, layers = check_pages(arena, page_map, layer, head_dim), page_map.shape[1]
    check("k", k, rows, map_heads, head_dim, dtypes=FLOAT)
    check("v", v, rows, map_heads, head_dim, dtypes=FLOAT)
    check("slot_page", slot_page, rows, dtypes=INT)
    check("slot_offset", slot_offset, rows, dtypes=INT)
    (k_row, k_head, _), (v_row, v_head, _) = k.stride(), v.stride()
    threads, chunk = _team(rows, 2 * kv_heads * head_dim)
    arguments = _WriteArguments(
        0, chunk, rows, kv_heads, head_dim, arena.shape[3] * arena.itemsize, KINDS[arena.dtype],
        k.data_ptr(), k_row * 4, k_head * 4, v.data_ptr(), v_row * 4, v_head * 4,
        arena.data_ptr(), arena.stride(0) * arena.itemsize, arena.shape[2],
        page_map.data_ptr() + layer * kv_heads * 4, layers * kv_heads * 4,
        slot_page.data_ptr(), slot_offset.data_ptr(),
    )  # fmt: skip
    _write(arguments, threads)


class _NormArguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("next", "chunk", "rows", "size")),
        *((name, ctypes.c_int64) for name in ("out", "x", "x_row", "weight")),
        *((name, ctypes.c_double) for name in ("eps", "offset")),
    ]


@kernel(_NormArguments)
def _norm(pointer):  # type: ignore[no-untyped-def]
    a = carray(pointer, 1)[0]
    row = a.size * 4
    start = fetch_add(address_of(pointer), a.chunk)
    while start < a.rows:
        for r in range(start, min(start + a.chunk, a.rows)):
            norm_row(a.out + r * row, a.x + r * a.x_row, a.weight, a.size, a.eps, a.offset)
        start = fetch_add(address_of(pointer), a.chunk)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Normalises x [n, H] by its root mean square and scales by offset + weight [H]; Gemma's offset is 1.

    All are float32. Rows of x may lie anywhere.
    """
    rows, size = x.shape
    check("x", x, rows, size, dtypes=FLOAT)
    check("weight", weight, size, dtypes=FLOAT)
    out = torch.empty((rows, size))
    threads, chunk = _team(rows, size)
    arguments = _NormArguments(
        0, chunk, rows, size, out.data_ptr(), x.data_ptr(), x.stride(0) * 4, weight.data_ptr(), eps, offset
    )
    _norm(arguments, threads)
    return out


class _RotateArguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("next", "chunk", "rows", "heads", "size")),
        *((name, ctypes.c_int64) for name in ("x", "x_row", "x_head", "cos", "cos_row", "sin", "sin_row")),
    ]


@kernel(_RotateArguments)
def _rotate(pointer):  # type: ignore[no-untyped-def]
    a = carray(pointer, 1)[0]
    start = fetch_add(address_of(pointer), a.chunk)
    while start < a.rows:
        for r in range(start, min(start + a.chunk, a.rows)):
            cos, sin = a.cos + r * a.cos_row, a.sin + r * a.sin_row
            for head in range(a.heads):
                rotate_row(a.x + r * a.x_row + head * a.x_head, cos, sin, a.size)
        start = fetch_add(address_of(pointer), a.chunk)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates the first R dimensions of x [n, heads, D] in place by cos, sin [n, R]; i pairs with R/2 + i.

    All are float32, with the last dimension contiguous; rows and heads may lie anywhere, so one call can turn
    the q and k heads of a fused projection's output.
    """
    rows, heads, head_dim = x.shape
    size = cos.shape[-1]
    check("x", x, rows, heads, head_dim, dtypes=FLOAT)
    check("cos", cos, rows, size, dtypes=FLOAT)
    check("sin", sin, rows, size, dtypes=FLOAT)
    if size > head_dim or size % 2:
        raise ValueError(f"cos, sin: want an even size up to {head_dim}, got {size}")
    threads, chunk = _team(rows, heads * size)
    arguments = _RotateArguments(
        0, chunk, rows, heads, size,
        x.data_ptr(), x.stride(0) * 4, x.stride(1) * 4,
        cos.data_ptr(), cos.stride(0) * 4, sin.data_ptr(), sin.stride(0) * 4,
    )  # fmt: skip
    _rotate(arguments, threads)
