"""Products over weights of 8, 6 or 4 bits, in panels of 32 outputs.

A panel lies in one piece, block after block; a block is a group, or 8 or 16 of them. First in it come the
scales of its outputs, then their offsets if there are some, then codes, group after group. If scales are
small integers times what the block's groups share (MULTIPLES), that is first, in float16, and then for each
group a byte; offsets lie in the same way.

Codes are unsigned bytes; a lane of a vector has those of four inputs of one output, two vectors
side by side are the panel's outputs, and such a step follows the other. With 4 bits a byte's low half belongs
to one step, its high half to the next. With 6 bits three bytes hold the codes of four steps: each one's own
in the low bits, and above them two bits of the fourth's. What a code c stands for is
scale · (c - zero) + offset.

Inputs are either float32, or they are rounded to 8 bits with a scale for each `unit` of 32 (16 if groups are
so short), and a unit's products are summed as integers, as in LLM.int8() (Dettmers et al., 2022) with smaller
vectors, and in GGML's dot products. A row's sums are the same however many rows are beside it.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
from numba import carray, njit

from kvloom.kernels.cpu.lanes.floats import (
    LANES,
    add,
    load,
    load_float16,
    multiply,
    multiply_add,
    splat,
    store,
    variant,
)
from kvloom.kernels.cpu.lanes.integers import (
    add_ints,
    byte_of,
    dot,
    high_halves,
    high_pairs,
    load_bytes,
    load_ints,
    load_splat,
    low_halves,
    low_six,
    raised_halves,
    sixteenths,
    splat_int,
    subtract_ints,
    to_floats,
)
from kvloom.kernels.cpu.memory import (
    address_of,
    aligned,
    fetch_add,
    observe,
    prefetch,
    read,
    read_int,
    rest,
)
from kvloom.kernels.cpu.parallel import kernel
from kvloom.kernels.cpu.quantized.rows import (
    FACTOR32,
    MULTIPLES,
    STEP,
    make_row_ready,
    sums_of,
    weight_at,
)

WIDTH: Final = 32  # outputs of a panel
ROWS: Final = 64  # rows of an item
_LINE: Final = LANES * 4
_AHEAD: Final = 4096  # bytes of weights that are on their way
_RUN: Final = 4  # steps that are unrolled; a unit has 4 or 8


class ProductArguments(ctypes.Structure):
    """The addresses and sizes of one call, after its counters: of rows begun and done, and of items begun in
    a cache line of their own.

    weight: of QuantizedArguments. bias: 0 for none, else room for whole panels. x: rows of float32, x_row
    bytes apart. ready: room for what they become, `ready_bytes` of a weight a row, at multiples of a line.
    """

    _fields_ = [
        ("counters", ctypes.c_int64 * 24),
        *((name, ctypes.c_int64) for name in ("weight", "bias", "x", "x_row", "rows", "to", "to_row")),
        *((name, ctypes.c_int64) for name in ("ready", "ready_row")),
    ]


_DONE, _ITEM = 8, 64  # bytes at which counters lie
SUMS_ROW: Final = 2 * WIDTH * 4  # bytes of a row of sums: two panels' outputs


@njit(inline="always")
def _two(a, at, n):  # type: ignore[no-untyped-def]
    """Returns the scales, or the offsets, of a panel's two vectors, for the group n of a block."""
    if a.form == FACTOR32:
        return load(at), load(at + _LINE)
    s0, s1 = load_float16(at), load_float16(at + _LINE // 2)
    if a.form == MULTIPLES:
        at += _LINE + n * WIDTH
        s0, s1 = multiply(s0, to_floats(load_bytes(at))), multiply(s1, to_floats(load_bytes(at + LANES)))
    return s0, s1


@njit(inline="always")
def place_of(a, panel, group):  # type: ignore[no-untyped-def]
    """Returns where a group's block begins, its number in it, and where its codes are."""
    at, n = panel + (group >> a.shift) * a.block_bytes, group & ((1 << a.shift) - 1)
    return at, n, at + a.head + n * a.group_bytes


@njit(inline="always")
def _ahead(w, size, end, jump):  # type: ignore[no-untyped-def]
    """Fetches what is read later than the `size` bytes at w; past the panel's end it is `jump` bytes away."""
    at = w + _AHEAD
    at += jump if at >= end else 0
    for line in range(0, size, _LINE):
        prefetch(at + line)


@njit(inline="always")
def _bytes8(w, step):  # type: ignore[no-untyped-def]
    """Returns the codes of two steps, two vectors each."""
    at = w + step * 2 * _LINE
    return load_ints(at), load_ints(at + _LINE), load_ints(at + 2 * _LINE), load_ints(at + 3 * _LINE)


@njit(inline="always")
def _bytes6(w, step):  # type: ignore[no-untyped-def]
    at = w + (step >> 2) * 6 * _LINE
    a0, a1 = load_ints(at), load_ints(at + _LINE)
    b0, b1 = load_ints(at + 2 * _LINE), load_ints(at + 3 * _LINE)
    c0, c1 = load_ints(at + 4 * _LINE), load_ints(at + 5 * _LINE)
    if step & 2 == 0:
        return low_six(a0), low_six(a1), low_six(b0), low_six(b1)
    return low_six(c0), low_six(c1), high_pairs(a0, b0, c0), high_pairs(a1, b1, c1)


@njit(inline="always")
def _bytes4(w, step):  # type: ignore[no-untyped-def]
    at = w + step * _LINE
    a, b = load_ints(at), load_ints(at + _LINE)
    return low_halves(a), low_halves(b), high_halves(a), high_halves(b)


@njit(inline="always")
def _raised4(w, step):  # type: ignore[no-untyped-def]
    """Returns the same, with 16 times the codes of the second step, where they lie."""
    at = w + step * _LINE
    a, b = load_ints(at), load_ints(at + _LINE)
    return low_halves(a), low_halves(b), raised_halves(a), raised_halves(b)


@njit(inline="always")
def _same(sums):  # type: ignore[no-untyped-def]
    return sums


@njit(inline="always")
def _offsets(a, at, n, g, sums, f0, f1, g0, g1, h0, h1, i0, i1):  # type: ignore[no-untyped-def]
    """Adds the offsets' part of a group to the sums of four rows. sums: where the rows have their groups'."""
    if a.offset != 0:
        o0, o1 = _two(a, at + a.offset, n)
        s0, s1, s2, s3 = sums
        t0, t1 = splat(read(s0 + 4 * g)), splat(read(s1 + 4 * g))
        t2, t3 = splat(read(s2 + 4 * g)), splat(read(s3 + 4 * g))
        f0, f1 = multiply_add(o0, t0, f0), multiply_add(o1, t0, f1)
        g0, g1 = multiply_add(o0, t1, g0), multiply_add(o1, t1, g1)
        h0, h1 = multiply_add(o0, t2, h0), multiply_add(o1, t2, h1)
        i0, i1 = multiply_add(o0, t3, i0), multiply_add(o1, t3, i1)
    return f0, f1, g0, g1, h0, h1, i0, i1


@njit(inline="always")
def _four_at(x0, x1, x2, x3):  # type: ignore[no-untyped-def]
    return load_splat(x0), load_splat(x1), load_splat(x2), load_splat(x3)


def _one_row(codes_of: Any, step_bytes: int, lowered: Any) -> Any:
    """Makes the product of one row. lowered: of a second step's sums makes what they are in units of the
    first's. soon: the address of what is read next."""

    @variant(codes_of, step_bytes, lowered)
    def one(a, panel, x, to, soon):  # type: ignore[no-untyped-def]
        f0 = f1 = splat(0.0)
        end, sums = panel + a.stride, sums_of(a, x)
        jump, many = soon - end, 4 * a.groups * a.units
        unit = x + many * a.steps
        for g in range(a.groups):
            at, n, w = place_of(a, panel, g)
            if n == 0:
                _ahead(at, a.head, end, jump)
            s0, s1 = _two(a, at, n)
            if a.offset != 0:
                o0, o1 = _two(a, at + a.offset, n)
                sum_ = splat(read(sums + 4 * g))
                f0, f1 = multiply_add(o0, sum_, f0), multiply_add(o1, sum_, f1)
            for _ in range(a.units):
                p0 = p1 = splat_int(read_int(unit + many))
                q0 = q1 = splat_int(0)
                for run in range(0, a.steps, _RUN):
                    _ahead(w + run * step_bytes, _RUN * step_bytes, end, jump)
                    for step in range(run, run + _RUN, 2):
                        w0, w1, w2, w3 = codes_of(w, step)
                        x0, x1 = load_splat(x + step * STEP), load_splat(x + (step + 1) * STEP)
                        p0, p1, q0, q1 = dot(p0, w0, x0), dot(p1, w1, x0), dot(q0, w2, x1), dot(q1, w3, x1)
                q0, q1 = lowered(q0), lowered(q1)
                factor = splat(read(unit))
                f0 = multiply_add(to_floats(add_ints(p0, q0)), multiply(factor, s0), f0)
                f1 = multiply_add(to_floats(add_ints(p1, q1)), multiply(factor, s1), f1)
                x, unit, w = x + a.steps * STEP, unit + 4, w + a.steps * step_bytes
        store(to, f0)
        store(to + _LINE, f1)

    return one


def _four_rows(codes_of: Any, step_bytes: int) -> tuple[Any, Any]:  # noqa: PLR0915 -- unrolled
    """Makes the products of four rows, rounded and as they are. soon: the address of what is read next."""

    @variant(codes_of, step_bytes)
    def four(a, panel, x0, x1, x2, x3, to, soon):  # type: ignore[no-untyped-def]
        f0 = f1 = g0 = g1 = h0 = h1 = i0 = i1 = splat(0.0)
        end, many = panel + a.stride, 4 * a.groups * a.units
        jump, sums = soon - end, (sums_of(a, x0), sums_of(a, x1), sums_of(a, x2), sums_of(a, x3))
        u0, u1, u2, u3 = x0 + many * a.steps, x1 + many * a.steps, x2 + many * a.steps, x3 + many * a.steps
        for g in range(a.groups):
            at, n, w = place_of(a, panel, g)
            if n == 0:
                _ahead(at, a.head, end, jump)
            s0, s1 = _two(a, at, n)
            f0, f1, g0, g1, h0, h1, i0, i1 = _offsets(a, at, n, g, sums, f0, f1, g0, g1, h0, h1, i0, i1)
            for _ in range(a.units):
                p0 = p1 = splat_int(read_int(u0 + many))
                q0 = q1 = splat_int(read_int(u1 + many))
                r0 = r1 = splat_int(read_int(u2 + many))
                v0 = v1 = splat_int(read_int(u3 + many))
                for run in range(0, a.steps, _RUN):
                    _ahead(w + run * step_bytes, _RUN * step_bytes, end, jump)
                    for step in range(run, run + _RUN, 2):
                        w0, w1, w2, w3 = codes_of(w, step)
                        k = step * STEP
                        y0, y1, y2, y3 = _four_at(x0 + k, x1 + k, x2 + k, x3 + k)
                        p0, p1, q0, q1 = dot(p0, w0, y0), dot(p1, w1, y0), dot(q0, w0, y1), dot(q1, w1, y1)
                        r0, r1, v0, v1 = dot(r0, w0, y2), dot(r1, w1, y2), dot(v0, w0, y3), dot(v1, w1, y3)
                        k += STEP
                        y0, y1, y2, y3 = _four_at(x0 + k, x1 + k, x2 + k, x3 + k)
                        p0, p1, q0, q1 = dot(p0, w2, y0), dot(p1, w3, y0), dot(q0, w2, y1), dot(q1, w3, y1)
                        r0, r1, v0, v1 = dot(r0, w2, y2), dot(r1, w3, y2), dot(v0, w2, y3), dot(v1, w3, y3)
                c0, c1 = splat(read(u0)), splat(read(u1))
                c2, c3 = splat(read(u2)), splat(read(u3))
                f0 = multiply_add(to_floats(p0), multiply(c0, s0), f0)
                f1 = multiply_add(to_floats(p1), multiply(c0, s1), f1)
                g0 = multiply_add(to_floats(q0), multiply(c1, s0), g0)
                g1 = multiply_add(to_floats(q1), multiply(c1, s1), g1)
                h0 = multiply_add(to_floats(r0), multiply(c2, s0), h0)
                h1 = multiply_add(to_floats(r1), multiply(c2, s1), h1)
                i0 = multiply_add(to_floats(v0), multiply(c3, s0), i0)
                i1 = multiply_add(to_floats(v1), multiply(c3, s1), i1)
                u0, u1, u2, u3, w = u0 + 4, u1 + 4, u2 + 4, u3 + 4, w + a.steps * step_bytes
                x0, x1 = x0 + a.steps * STEP, x1 + a.steps * STEP
                x2, x3 = x2 + a.steps * STEP, x3 + a.steps * STEP
        _keep(to, f0, f1, g0, g1, h0, h1, i0, i1)

    @variant(codes_of, step_bytes)
    def exact(a, panel, x0, x1, x2, x3, sums, to, soon):  # type: ignore[no-untyped-def]
        """Computes the products of four rows of float32. sums: where the rows have those of their groups."""
        f0 = f1 = g0 = g1 = h0 = h1 = i0 = i1 = splat(0.0)
        end, jump = panel + a.stride, soon - panel - a.stride
        zero = splat_int(a.zero)
        for g in range(a.groups):
            at, n, w = place_of(a, panel, g)
            s0, s1 = _two(a, at, n)
            f0, f1, g0, g1, h0, h1, i0, i1 = _offsets(a, at, n, g, sums, f0, f1, g0, g1, h0, h1, i0, i1)
            p0 = p1 = q0 = q1 = r0 = r1 = v0 = v1 = splat(0.0)
            for step in range(0, a.units * a.steps, 2):
                _ahead(w + step * step_bytes, 2 * step_bytes, end, jump)
                w0, w1, w2, w3 = codes_of(w, step)
                for j in range(2 * STEP):
                    c0, c1 = (w0, w1) if j < STEP else (w2, w3)
                    n0 = to_floats(subtract_ints(byte_of(c0, j % STEP), zero))
                    n1 = to_floats(subtract_ints(byte_of(c1, j % STEP), zero))
                    y0, y1, y2, y3 = splat(read(x0)), splat(read(x1)), splat(read(x2)), splat(read(x3))
                    p0, p1 = multiply_add(n0, y0, p0), multiply_add(n1, y0, p1)
                    q0, q1 = multiply_add(n0, y1, q0), multiply_add(n1, y1, q1)
                    r0, r1 = multiply_add(n0, y2, r0), multiply_add(n1, y2, r1)
                    v0, v1 = multiply_add(n0, y3, v0), multiply_add(n1, y3, v1)
                    x0, x1, x2, x3 = x0 + 4, x1 + 4, x2 + 4, x3 + 4
            f0, f1 = multiply_add(p0, s0, f0), multiply_add(p1, s1, f1)
            g0, g1 = multiply_add(q0, s0, g0), multiply_add(q1, s1, g1)
            h0, h1 = multiply_add(r0, s0, h0), multiply_add(r1, s1, h1)
            i0, i1 = multiply_add(v0, s0, i0), multiply_add(v1, s1, i1)
        _keep(to, f0, f1, g0, g1, h0, h1, i0, i1)

    return four, exact


@njit(inline="always")
def _keep(to, f0, f1, g0, g1, h0, h1, i0, i1):  # type: ignore[no-untyped-def]
    store(to, f0)
    store(to + _LINE, f1)
    store(to + SUMS_ROW, g0)
    store(to + SUMS_ROW + _LINE, g1)
    store(to + 2 * SUMS_ROW, h0)
    store(to + 2 * SUMS_ROW + _LINE, h1)
    store(to + 3 * SUMS_ROW, i0)
    store(to + 3 * SUMS_ROW + _LINE, i1)


_one8, (_four8, _exact8) = _one_row(_bytes8, 2 * _LINE, _same), _four_rows(_bytes8, 2 * _LINE)
_one6, (_four6, _exact6) = _one_row(_bytes6, 3 * _LINE // 2, _same), _four_rows(_bytes6, 3 * _LINE // 2)
_one4, (_four4, _exact4) = _one_row(_raised4, _LINE, sixteenths), _four_rows(_bytes4, _LINE)


@njit(inline="never")
def rows_by_panel(a, panel, x, x_row, ready, ready_row, rows, to, soon):  # type: ignore[no-untyped-def]
    """Computes to [rows up to fours, 32 of 64] = x · a panel's weights. Of four rows the last may be
    repeated."""
    end, ready_end = x + (rows - 1) * x_row, ready + (rows - 1) * ready_row
    for r in range(0, rows, 4):
        at, next_ = to + r * SUMS_ROW, soon if r + 4 >= rows else panel
        r0 = ready + r * ready_row
        r1, r2 = min(r0 + ready_row, ready_end), min(r0 + 2 * ready_row, ready_end)
        r3 = min(r0 + 3 * ready_row, ready_end)
        if a.exact != 0:
            x0 = x + r * x_row
            x1, x2, x3 = min(x0 + x_row, end), min(x0 + 2 * x_row, end), min(x0 + 3 * x_row, end)
            sums = sums_of(a, r0), sums_of(a, r1), sums_of(a, r2), sums_of(a, r3)
            if a.bits == 8:
                _exact8(a, panel, x0, x1, x2, x3, sums, at, next_)
            elif a.bits == 6:
                _exact6(a, panel, x0, x1, x2, x3, sums, at, next_)
            else:
                _exact4(a, panel, x0, x1, x2, x3, sums, at, next_)
        elif rows - r == 1:
            if a.bits == 8:
                _one8(a, panel, r0, at, next_)
            elif a.bits == 6:
                _one6(a, panel, r0, at, next_)
            else:
                _one4(a, panel, r0, at, next_)
        elif a.bits == 8:
            _four8(a, panel, r0, r1, r2, r3, at, next_)
        elif a.bits == 6:
            _four6(a, panel, r0, r1, r2, r3, at, next_)
        else:
            _four4(a, panel, r0, r1, r2, r3, at, next_)


@njit(inline="never")
def _put(a, panel, row, rows, from_):  # type: ignore[no-untyped-def]
    """Stores the sums of rows, with the bias."""
    for r in range(rows):
        for i in range(0, 2 * _LINE, _LINE):
            value = load(from_ + r * SUMS_ROW + i)
            if a.bias != 0:
                value = add(value, load(a.bias + panel * 2 * _LINE + i))
            store(a.to + (row + r) * a.to_row + panel * 2 * _LINE + i, value)


@kernel(ProductArguments)
def multiply_quantized(pointer):  # type: ignore[no-untyped-def]
    """Computes to [rows, 32 · count] = x · weightᵀ + bias."""
    a, counters = carray(pointer, 1)[0], address_of(pointer)
    weight, row = weight_at(a.weight), fetch_add(counters, 1)
    while row < a.rows:
        make_row_ready(weight, a.x + row * a.x_row, a.ready + row * a.ready_row)
        fetch_add(counters + _DONE, 1)
        row = fetch_add(counters, 1)
    turns = 0
    while observe(counters + _DONE) < a.rows:
        turns += 1
        rest(turns)
    scratch = np.empty(ROWS * 2 * WIDTH + LANES, np.float32)
    sums = aligned(scratch)
    items = weight.count * ((a.rows + ROWS - 1) // ROWS)
    item = fetch_add(counters + _ITEM, 1)
    while item < items:
        coming = fetch_add(counters + _ITEM, 1)
        number, first = item % weight.count, item // weight.count * ROWS
        rows, panel = min(ROWS, a.rows - first), weight.panels + number * weight.stride
        x, ready = a.x + first * a.x_row, a.ready + first * a.ready_row
        soon = weight.panels + coming % weight.count * weight.stride
        rows_by_panel(weight, panel, x, a.x_row, ready, a.ready_row, rows, sums, soon)
        _put(a, number, first, rows, sums)
        item = coming
    scratch[0] = 0  # see `aligned`
