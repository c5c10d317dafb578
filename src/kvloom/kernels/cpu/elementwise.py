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

from kvloom.kernels.cpu.memory import address_of, fetch_add, read, read_int, write
from kvloom.kernels.cpu.parallel import kernel
from kvloom.kernels.cpu.vector import LANES, add, load, multiply, multiply_add, splat, store, subtract, total


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


def _team(rows: int, row_values: int, threads: int | None) -> tuple[int, int]:
    """Returns the threads for the call, and the rows that a thread takes at once."""
    if rows * row_values < _SERIAL:
        return 1, rows
    threads = torch.get_num_threads() if threads is None else threads
    return threads, max(1, rows // (threads * 4))


class _WriteArguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("next", "chunk", "rows", "kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("k", "k_row", "k_head", "v", "v_row", "v_head")),
        *((name, ctypes.c_int64) for name in ("arena", "block_bytes", "page_tokens", "map", "map_page")),
        *((name, ctypes.c_int64) for name in ("slot_page", "slot_offset")),
    ]


@kernel(_WriteArguments)
def _write(pointer):  # type: ignore[no-untyped-def]
    a = carray(pointer, 1)[0]
    size = a.head_dim * 4
    start = fetch_add(address_of(pointer), a.chunk)
    while start < a.rows:
        for i in range(start, min(start + a.chunk, a.rows)):
            blocks = a.map + read_int(a.slot_page + i * 4) * a.map_page
            offset = read_int(a.slot_offset + i * 4) * size
            for head in range(a.kv_heads):
                to = a.arena + read_int(blocks + head * 4) * a.block_bytes + offset
                copy_row(to, a.k + i * a.k_row + head * a.k_head, size)
                copy_row(to + a.page_tokens * size, a.v + i * a.v_row + head * a.v_head, size)
        start = fetch_add(address_of(pointer), a.chunk)


def write_kv(
    arena: Tensor,
    page_map: Tensor,
    layer: int,
    k: Tensor,
    v: Tensor,
    slot_page: Tensor,
    slot_offset: Tensor,
    threads: int | None = None,
) -> None:
    """Stores k, v [n, kv_heads, D] in arena [blocks, 2, T, D] at token slot_offset[i] of page slot_page[i].

    arena, k and v are float32; page_map [pages, layers, kv_heads], slot_page [n] and slot_offset [n] int32.
    Rows of k and v may lie anywhere. No two slots may be the same.
    """
    rows, kv_heads, head_dim = k.shape
    _, two, page_tokens, arena_dim = arena.shape
    _, layers, map_heads = page_map.shape
    if not (k.dtype is v.dtype is arena.dtype is torch.float32):
        raise TypeError(f"k, v, arena: want float32, got {k.dtype}, {v.dtype}, {arena.dtype}")
    if not (slot_page.dtype is slot_offset.dtype is page_map.dtype is torch.int32):
        raise TypeError("slot_page, slot_offset, page_map: want int32")
    if (
        v.shape != k.shape
        or two != 2
        or arena_dim != head_dim
        or map_heads != kv_heads
        or not 0 <= layer < layers
        or not len(slot_page) == len(slot_offset) == rows
    ):
        raise ValueError(
            f"k {tuple(k.shape)}, v {tuple(v.shape)}, arena {tuple(arena.shape)}, "
            f"page_map {tuple(page_map.shape)}, layer {layer}, {len(slot_page)} and {len(slot_offset)} slots "
            "do not fit"
        )
    k_row, k_head, k_last = k.stride()
    v_row, v_head, v_last = v.stride()
    if (
        k_last != 1
        or v_last != 1
        or not (page_map.is_contiguous() and slot_page.is_contiguous() and slot_offset.is_contiguous())
    ):
        raise ValueError("k, v: the last dimension must be contiguous; page_map and slots all of them")
    threads, chunk = _team(rows, 2 * kv_heads * head_dim, threads)
    arguments = _WriteArguments(
        0, chunk, rows, kv_heads, head_dim,
        k.data_ptr(), k_row * 4, k_head * 4, v.data_ptr(), v_row * 4, v_head * 4,
        arena.data_ptr(), arena.stride(0) * 4, page_tokens,
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


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    out: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """Normalises x [n, H] by its root mean square and scales by offset + weight [H]; Gemma's offset is 1.

    All are float32. Rows of x may lie anywhere; out is contiguous, made if not given, and may be x itself.
    """
    rows, size = x.shape
    if out is None:
        out = torch.empty((rows, size))
    if not (x.dtype is weight.dtype is out.dtype is torch.float32):
        raise TypeError(f"x, weight, out: want float32, got {x.dtype}, {weight.dtype}, {out.dtype}")
    x_row, x_last = x.stride()
    if out.shape != x.shape or weight.shape != (size,):
        shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and out {tuple(out.shape)}"
        raise ValueError(f"{shapes} do not fit")
    if x_last != 1 or not (weight.is_contiguous() and out.is_contiguous()):
        raise ValueError("x: the last dimension must be contiguous; weight and out all of them")
    threads, chunk = _team(rows, size, threads)
    arguments = _NormArguments(
        0, chunk, rows, size, out.data_ptr(), x.data_ptr(), x_row * 4, weight.data_ptr(), eps, offset
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


def rotate(x: Tensor, cos: Tensor, sin: Tensor, threads: int | None = None) -> None:
    """Rotates the first R dimensions of x [n, heads, D] in place by cos, sin [n, R]; i pairs with R/2 + i.

    All are float32, with the last dimension contiguous; rows and heads may lie anywhere, so one call can turn
    the q and k heads of a fused projection's output.
    """
    rows, heads, head_dim = x.shape
    cos_rows, size = cos.shape
    if not (x.dtype is cos.dtype is sin.dtype is torch.float32):
        raise TypeError(f"x, cos, sin: want float32, got {x.dtype}, {cos.dtype}, {sin.dtype}")
    if sin.shape != cos.shape or cos_rows != rows or size > head_dim or size % 2:
        raise ValueError(f"x {tuple(x.shape)}, cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit")
    x_row, x_head, x_last = x.stride()
    cos_row, cos_last = cos.stride()
    sin_row, sin_last = sin.stride()
    if x_last != 1 or cos_last != 1 or sin_last != 1:
        raise ValueError("x, cos, sin: the last dimension must be contiguous")
    threads, chunk = _team(rows, heads * size, threads)
    arguments = _RotateArguments(
        0, chunk, rows, heads, size,
        x.data_ptr(), x_row * 4, x_head * 4, cos.data_ptr(), cos_row * 4, sin.data_ptr(), sin_row * 4,
    )  # fmt: skip
    _rotate(arguments, threads)
