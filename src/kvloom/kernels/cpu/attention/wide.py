"""Attention of many queries over a tile of keys that all of them may see: K is transposed so that keys lie in
lanes, K and V are widened to float32 once for all queries, and both products are of rows by panels of 64
columns, with the sums of six rows in registers: 24 multiplications for ten loads. For the few queries of a
decode step `tile.py` reads rows of K and V as they lie in the pool.

A query's sums are the same, to the bit, whatever queries are beside it: each is taken from its first key to
its last, over tiles that lie where its keys are.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types

from kvloom.kernels.cpu.attention.tile import TILE, weigh
from kvloom.kernels.cpu.kv_rows import BFLOAT16, FLOAT32, SCALE, load_int8, read_int8
from kvloom.kernels.cpu.lanes.floats import (
    LANES,
    float32x16,
    load,
    load_bfloat16,
    multiply,
    multiply_add,
    operation,
    pointer,
    read_bfloat16,
    splat,
    store,
    variant,
)
from kvloom.kernels.cpu.memory import LINE, prefetch, read, read_int, write
from kvloom.kernels.cpu.panels import store_four

KEYS: Final = TILE  # of a tile at most; the columns of a panel
KEY_ROW: Final = (KEYS + LANES) * 4  # bytes of a row of transposed K; a page's last keys may go past its end
SCORE_ROW: Final = KEYS * 4  # bytes of a query's scores
_STEP: Final = LANES * 4
_ROWS = 6  # whose sums are in registers

_i32 = ir.IntType(32)


def _swapped(builder: Any, rows: list[Any], width: int) -> list[Any]:
    """Emits one step of a transposition: blocks of `width` off the diagonal change places."""

    def mask(take: Any) -> Any:
        return ir.Constant(ir.VectorType(_i32, LANES), [take(i) for i in range(LANES)])

    upper = mask(lambda i: LANES + i - width if i & width else i)
    lower = mask(lambda i: LANES + i if i & width else i + width)
    out = list(rows)
    for i in range(LANES):
        if not i & width:
            a, b = rows[i], rows[i + width]
            out[i], out[i + width] = (builder.shuffle_vector(a, b, m) for m in (upper, lower))
    return out


@operation(types.void, types.int64, *[float32x16] * LANES)
def _store_transposed(builder: Any, address: Any, *rows: Any) -> Any:
    """Stores the first number of all rows, then the second, and so on, KEY_ROW bytes apart."""
    columns = list(rows)
    for width in (8, 4, 2, 1):
        columns = _swapped(builder, columns, width)
    for i, row in enumerate(columns):
        at = builder.add(address, ir.Constant(ir.IntType(64), i * KEY_ROW))
        builder.store(row, pointer(builder, at, row.type), align=4)


@njit(inline="always")
def _load_float32(at, i, row):  # type: ignore[no-untyped-def]
    return load(at + i * 4)


@njit(inline="always")
def _load_bfloat16(at, i, row):  # type: ignore[no-untyped-def]
    return load_bfloat16(at + i * 2)


@njit(inline="always")
def _load_int8(at, i, row):  # type: ignore[no-untyped-def]
    return multiply(load_int8(at + i), splat(read(at + row - SCALE)))


@njit(inline="always")
def _read_float32(at, i, row):  # type: ignore[no-untyped-def]
    return read(at + i * 4)


@njit(inline="always")
def _read_bfloat16(at, i, row):  # type: ignore[no-untyped-def]
    return read_bfloat16(at + i * 2)


@njit(inline="always")
def _read_int8(at, i, row):  # type: ignore[no-untyped-def]
    return read_int8(at + i) * read(at + row - SCALE)


def _loader(load_numbers: Any, read_number: Any) -> Any:
    """Makes `_load_rows` for rows in a format that these read."""

    @variant(load_numbers, read_number)
    def load_keys(to, k, row, count, dim):  # type: ignore[no-untyped-def]
        whole = dim // LANES * LANES
        for t in range(0, count, LANES):
            last = k + (count - 1) * row
            k0 = k + t * row
            k1, k2, k3 = min(k0 + row, last), min(k0 + 2 * row, last), min(k0 + 3 * row, last)
            k4, k5, k6 = min(k0 + 4 * row, last), min(k0 + 5 * row, last), min(k0 + 6 * row, last)
            k7, k8, k9 = min(k0 + 7 * row, last), min(k0 + 8 * row, last), min(k0 + 9 * row, last)
            k10, k11, k12 = min(k0 + 10 * row, last), min(k0 + 11 * row, last), min(k0 + 12 * row, last)
            k13, k14, k15 = min(k0 + 13 * row, last), min(k0 + 14 * row, last), min(k0 + 15 * row, last)
            for i in range(0, whole, LANES):
                _store_transposed(
                    to + t * 4 + i * KEY_ROW,
                    load_numbers(k0, i, row), load_numbers(k1, i, row),
                    load_numbers(k2, i, row), load_numbers(k3, i, row),
                    load_numbers(k4, i, row), load_numbers(k5, i, row),
                    load_numbers(k6, i, row), load_numbers(k7, i, row),
                    load_numbers(k8, i, row), load_numbers(k9, i, row),
                    load_numbers(k10, i, row), load_numbers(k11, i, row),
                    load_numbers(k12, i, row), load_numbers(k13, i, row),
                    load_numbers(k14, i, row), load_numbers(k15, i, row),
                )  # fmt: skip
        for t in range(count):
            for i in range(whole, dim):
                write(to + i * KEY_ROW + t * 4, read_number(k + t * row, i, row))

    @variant(load_numbers, read_number)
    def load_values(to, v, row, count, dim):  # type: ignore[no-untyped-def]
        whole = dim // LANES * LANES
        for t in range(count):
            at, here = to + t * dim * 4, v + t * row
            for i in range(0, whole, LANES):
                store(at + i * 4, load_numbers(here, i, row))
            for i in range(whole, dim):
                write(at + i * 4, read_number(here, i, row))

    @variant(load_numbers, read_number)
    def load_both(keys, values, k, v, row, count, dim):  # type: ignore[no-untyped-def]
        load_keys(keys, k, row, count, dim)
        load_values(values, v, row, count, dim)

    return load_both


_load_rows_float32 = _loader(_load_float32, _read_float32)
_load_rows_bfloat16 = _loader(_load_bfloat16, _read_bfloat16)
_load_rows_int8 = _loader(_load_int8, _read_int8)


@njit(inline="never")
def _load_rows(keys, values, k, v, row, kind, count, dim):  # type: ignore[no-untyped-def]
    """Loads `count` rows of K, transposed, to `keys` [D, KEY_ROW], and of V to `values` [count, D], both in
    float32. Rows are of the format `kind`, `row` bytes each. What lies in `keys` after them is
    overwritten."""
    if kind == FLOAT32:
        _load_rows_float32(keys, values, k, v, row, count, dim)
    elif kind == BFLOAT16:
        _load_rows_bfloat16(keys, values, k, v, row, count, dim)
    else:
        _load_rows_int8(keys, values, k, v, row, count, dim)


@njit(inline="never")
def _six(c0, c1, c2, c3, c4, c5, a0, a1, a2, a3, a4, a5, b, b_row, depth, onto):  # type: ignore[no-untyped-def]
    """Computes six rows of a panel of 64 columns."""
    p0 = p1 = p2 = p3 = splat(0.0)
    q0 = q1 = q2 = q3 = splat(0.0)
    r0 = r1 = r2 = r3 = splat(0.0)
    s0 = s1 = s2 = s3 = splat(0.0)
    t0 = t1 = t2 = t3 = splat(0.0)
    u0 = u1 = u2 = u3 = splat(0.0)
    if onto:
        p0, p1, p2, p3 = load(c0), load(c0 + _STEP), load(c0 + 2 * _STEP), load(c0 + 3 * _STEP)
        q0, q1, q2, q3 = load(c1), load(c1 + _STEP), load(c1 + 2 * _STEP), load(c1 + 3 * _STEP)
        r0, r1, r2, r3 = load(c2), load(c2 + _STEP), load(c2 + 2 * _STEP), load(c2 + 3 * _STEP)
        s0, s1, s2, s3 = load(c3), load(c3 + _STEP), load(c3 + 2 * _STEP), load(c3 + 3 * _STEP)
        t0, t1, t2, t3 = load(c4), load(c4 + _STEP), load(c4 + 2 * _STEP), load(c4 + 3 * _STEP)
        u0, u1, u2, u3 = load(c5), load(c5 + _STEP), load(c5 + 2 * _STEP), load(c5 + 3 * _STEP)
    for k in range(depth):
        i, at = k * 4, b + k * b_row
        b0, b1, b2, b3 = load(at), load(at + _STEP), load(at + 2 * _STEP), load(at + 3 * _STEP)
        a = splat(read(a0 + i))
        p0, p1 = multiply_add(a, b0, p0), multiply_add(a, b1, p1)
        p2, p3 = multiply_add(a, b2, p2), multiply_add(a, b3, p3)
        a = splat(read(a1 + i))
        q0, q1 = multiply_add(a, b0, q0), multiply_add(a, b1, q1)
        q2, q3 = multiply_add(a, b2, q2), multiply_add(a, b3, q3)
        a = splat(read(a2 + i))
        r0, r1 = multiply_add(a, b0, r0), multiply_add(a, b1, r1)
        r2, r3 = multiply_add(a, b2, r2), multiply_add(a, b3, r3)
        a = splat(read(a3 + i))
        s0, s1 = multiply_add(a, b0, s0), multiply_add(a, b1, s1)
        s2, s3 = multiply_add(a, b2, s2), multiply_add(a, b3, s3)
        a = splat(read(a4 + i))
        t0, t1 = multiply_add(a, b0, t0), multiply_add(a, b1, t1)
        t2, t3 = multiply_add(a, b2, t2), multiply_add(a, b3, t3)
        a = splat(read(a5 + i))
        u0, u1 = multiply_add(a, b0, u0), multiply_add(a, b1, u1)
        u2, u3 = multiply_add(a, b2, u2), multiply_add(a, b3, u3)
    store_four(c0, p0, p1, p2, p3)
    store_four(c1, q0, q1, q2, q3)
    store_four(c2, r0, r1, r2, r3)
    store_four(c3, s0, s1, s2, s3)
    store_four(c4, t0, t1, t2, t3)
    store_four(c5, u0, u1, u2, u3)


@njit(inline="never")
def locate(a, b, head, position):  # type: ignore[no-untyped-def]
    """Returns the address of K of a token of row b, in the block of one KV head. a: the arguments of a kernel
    over pages, here and below."""
    page = read_int(a.tables + b * a.table_row + position // a.page_tokens * 4)
    block = read_int(a.map + page * a.map_page + head * 4)
    return a.arena + block * a.block_bytes + position % a.page_tokens * a.row_bytes


@njit(inline="never")
def load_tile(a, b, head, position, count, keys, values):  # type: ignore[no-untyped-def]
    """Loads `count` tokens of row b from `position` on into scratch, as `_load_rows` does, page by page."""
    done = 0
    while done < count:
        k = locate(a, b, head, position + done)
        part = min(count - done, a.page_tokens - (position + done) % a.page_tokens)
        v, to = k + a.page_tokens * a.row_bytes, values + done * a.head_dim * 4
        _load_rows(keys + done * 4, to, k, v, a.row_bytes, a.kind, part, a.head_dim)
        done += part


@njit(inline="never")
def prefetch_tile(a, b, head, position, end, part, parts):  # type: ignore[no-untyped-def]
    """Fetches a part of the tile from `position` on, which is loaded next, while this one is weighed."""
    count = min(KEYS, end - position)
    for t in range(count * part // parts, count * (part + 1) // parts):
        k = locate(a, b, head, position + t)
        for i in range(0, a.row_bytes, LINE):
            prefetch(k + i)
            prefetch(k + a.page_tokens * a.row_bytes + i)


@njit(inline="never")
def _six_narrow(c0, c1, c2, c3, c4, c5, a0, a1, a2, a3, a4, a5, b, b_row, depth, onto):  # type: ignore[no-untyped-def]
    """Computes six rows of 16 columns."""
    p = q = r = s = t = u = splat(0.0)
    if onto:
        p, q, r, s, t, u = load(c0), load(c1), load(c2), load(c3), load(c4), load(c5)
    for k in range(depth):
        i, w = k * 4, load(b + k * b_row)
        p, q = multiply_add(splat(read(a0 + i)), w, p), multiply_add(splat(read(a1 + i)), w, q)
        r, s = multiply_add(splat(read(a2 + i)), w, r), multiply_add(splat(read(a3 + i)), w, s)
        t, u = multiply_add(splat(read(a4 + i)), w, t), multiply_add(splat(read(a5 + i)), w, u)
    store(c0, p)
    store(c1, q)
    store(c2, r)
    store(c3, s)
    store(c4, t)
    store(c5, u)


@njit(inline="never")
def multiply_rows(c, c_row, a, a_row, rows, b, b_row, depth, columns, onto):  # type: ignore[no-untyped-def]
    """Computes c [rows, columns] = [c +] a [rows, depth] · b [depth, columns]. Rows are their `_row` bytes
    apart. The last of six rows may be repeated: each of its sums is read before it is written."""
    panels, whole = columns // KEYS * KEYS, columns // LANES * LANES
    a_last, c_last = a + (rows - 1) * a_row, c + (rows - 1) * c_row
    for r in range(0, rows, _ROWS):
        a0, c0 = a + r * a_row, c + r * c_row
        a1, c1 = min(a0 + a_row, a_last), min(c0 + c_row, c_last)
        a2, c2 = min(a0 + 2 * a_row, a_last), min(c0 + 2 * c_row, c_last)
        a3, c3 = min(a0 + 3 * a_row, a_last), min(c0 + 3 * c_row, c_last)
        a4, c4 = min(a0 + 4 * a_row, a_last), min(c0 + 4 * c_row, c_last)
        a5, c5 = min(a0 + 5 * a_row, a_last), min(c0 + 5 * c_row, c_last)
        for j in range(0, panels * 4, KEYS * 4):
            _six(
                c0 + j, c1 + j, c2 + j, c3 + j, c4 + j, c5 + j,
                a0, a1, a2, a3, a4, a5, b + j, b_row, depth, onto,
            )  # fmt: skip
        for j in range(panels * 4, whole * 4, _STEP):
            _six_narrow(
                c0 + j, c1 + j, c2 + j, c3 + j, c4 + j, c5 + j,
                a0, a1, a2, a3, a4, a5, b + j, b_row, depth, onto,
            )  # fmt: skip
    for r in range(rows):
        for j in range(whole * 4, columns * 4, 4):
            s = read(c + r * c_row + j) if onto else types.float32(0)
            for k in range(depth):
                s += read(a + r * a_row + k * 4) * read(b + k * b_row + j)
            write(c + r * c_row + j, s)


@njit(inline="never")
def clear(sums, best, norm, rows, dim, lowest):  # type: ignore[no-untyped-def]
    """Readies the online softmax of `rows` queries."""
    for i in range(0, rows * dim * 4, 4):
        write(sums + i, 0.0)
    for i in range(0, rows * 4, 4):
        write(best + i, lowest)
        write(norm + i, 0.0)


@njit(inline="never")
def put_sinks(a, best, norm, rows, first_head, end_head):  # type: ignore[no-untyped-def]
    """Begins the online softmax of `rows` queries a head with the heads' sinks, if they have some: keys that
    have no value."""
    if a.sinks == 0:
        return
    for i in range((end_head - first_head) * rows):
        head = (first_head + i // rows) * a.group + i % a.group
        write(best + i * 4, read(a.sinks + head * 4))
        write(norm + i * 4, 1.0)


@njit(inline="always")
def slope_of(a, head):  # type: ignore[no-untyped-def]
    """Returns the slope of a query head; 0 if distances change no scores."""
    return read(a.slopes + head * 4) if a.slopes != 0 else np.float32(0)


@njit(inline="never")
def score_tile(scores, q, rows, keys, count, dim):  # type: ignore[no-untyped-def]
    """Computes scores [rows, SCORE_ROW] of q [rows, D] against `count` loaded keys, up to whole
    vectors."""
    columns = (count + LANES - 1) // LANES * LANES
    multiply_rows(scores, SCORE_ROW, q, dim * 4, rows, keys, KEY_ROW, dim, columns, False)


@njit(inline="never")
def weigh_tile(scores, best, norm, sums, low, high, count, dim, scale, softcap, slope, ahead):  # type: ignore[no-untyped-def]
    """Weighs one query's scores of the keys [low, high) of `count`; others get the weight 0, and if there are
    none, nothing else happens. All else is as in `weigh`."""
    begin, end = low // LANES * LANES, (high + LANES - 1) // LANES * LANES
    if low < high:
        weigh(scores, best, norm, sums, low, high, dim, scale, softcap, slope, ahead)
    else:
        begin = end = 0
    for i in range(0, begin * 4, _STEP):
        store(scores + i, splat(0.0))
    for i in range(end * 4, count * 4, _STEP):
        store(scores + i, splat(0.0))


@njit(inline="never")
def sum_tile(sums, scores, rows, values, count, dim):  # type: ignore[no-untyped-def]
    """Adds weights [rows, SCORE_ROW] times `count` loaded rows of V to sums [rows, D]."""
    multiply_rows(sums, dim * 4, scores, SCORE_ROW, rows, values, dim * 4, count, dim, True)
