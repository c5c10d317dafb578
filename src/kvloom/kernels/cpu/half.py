"""Weights of 16 bits in panels, and products over them: numbers are widened to float32 as they are read,
which is exact, and sums are of float32. Rows may be rounded to bfloat16, as weights are, for processors that
multiply pairs of it.

A panel (`panels.py`) holds for each two inputs 256 bytes. In bfloat16 these are 64 pairs, so that a shift
and a mask make two vectors of one load; in float16 64 numbers of the one input and 64 of the other. An odd
last input has a neighbour of zeros, and outputs that are lacking in the last panel are zeros, too.

A row's sums are the same, to the bit, whatever rows are beside it: each is taken from its first input to its
last.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor
from torch.nn import functional

from kvloom.kernels.cpu.lanes.floats import (
    HAS_HALF,
    LANES,
    add,
    load,
    load_bfloat16,
    load_even_bfloat16,
    load_float16,
    load_odd_bfloat16,
    multiply_add,
    read_bfloat16,
    read_float16,
    splat,
    store,
    store_bfloat16,
    variant,
    write_bfloat16,
)
from kvloom.kernels.cpu.lanes.integers import HAS_BFLOAT16_DOT, dot_bfloat16, load_ints, load_splat
from kvloom.kernels.cpu.memory import address_of, aligned, fetch_add, read, read_int, write
from kvloom.kernels.cpu.panels import (
    PANEL,
    STEP_BYTES,
    VECTOR,
    any_rows,
    prefetch_ahead,
    stepwise_product,
    store_four,
)
from kvloom.kernels.cpu.parallel import kernel
from kvloom.kernels.reference import check

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2  # number formats of weights; those of K and V are in `kv_rows.py`
_BLOCK = 96  # rows whose sums are kept at once
_FEW_ROWS = 8  # outputs for which waking a team does not pay
ROUNDED: Final = 4  # panels of bfloat16, and rows that are rounded to it
FORMATS: Final = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


def narrow_formats() -> frozenset[torch.dtype]:
    """Returns the formats of 16 bits that this processor widens in registers. Any shifts bfloat16; float16
    wants an instruction for it."""
    return frozenset({torch.bfloat16, torch.float16} if HAS_HALF else {torch.bfloat16})


@njit(inline="always")
def _bfloat16_pair(at, lane):  # type: ignore[no-untyped-def]
    return load_even_bfloat16(at + lane * VECTOR), load_odd_bfloat16(at + lane * VECTOR)


@njit(inline="always")
def _float16_pair(at, lane):  # type: ignore[no-untyped-def]
    half = at + lane * (VECTOR // 2)
    return load_float16(half), load_float16(half + PANEL * 2)


def _one_row(pair_of: Callable[..., Any]) -> Any:
    """Makes the product of one row and a panel. pair_of: loads a vector of weights of one input and that of
    the next."""

    @variant(pair_of)
    def one(to, x, w, depth, soon):  # type: ignore[no-untyped-def]
        s0 = s1 = s2 = s3 = splat(0.0)
        pairs = (depth + 1) // 2
        for pair in range(pairs):
            prefetch_ahead(w, pair, pairs, soon)
            at, single = w + pair * STEP_BYTES, pair * 2 + 1 == depth
            u0, v0 = pair_of(at, 0)
            u1, v1 = pair_of(at, 1)
            u2, v2 = pair_of(at, 2)
            u3, v3 = pair_of(at, 3)
            a = splat(read(x + pair * 8))
            s0, s1 = multiply_add(a, u0, s0), multiply_add(a, u1, s1)
            s2, s3 = multiply_add(a, u2, s2), multiply_add(a, u3, s3)
            if not single:
                a = splat(read(x + pair * 8 + 4))
                s0, s1 = multiply_add(a, v0, s0), multiply_add(a, v1, s1)
                s2, s3 = multiply_add(a, v2, s2), multiply_add(a, v3, s3)
        store_four(to, s0, s1, s2, s3)

    return one


def _four_rows(pair_of: Callable[..., Any]) -> Any:
    """Makes the product of four rows and a panel."""

    @variant(pair_of)
    def four(to, x0, x1, x2, x3, w, depth, soon):  # type: ignore[no-untyped-def]
        a0 = a1 = a2 = a3 = splat(0.0)
        b0 = b1 = b2 = b3 = splat(0.0)
        c0 = c1 = c2 = c3 = splat(0.0)
        d0 = d1 = d2 = d3 = splat(0.0)
        pairs = (depth + 1) // 2
        for pair in range(pairs):
            prefetch_ahead(w, pair, pairs, soon)
            at, i = w + pair * STEP_BYTES, pair * 8
            u0, v0 = pair_of(at, 0)
            u1, v1 = pair_of(at, 1)
            u2, v2 = pair_of(at, 2)
            u3, v3 = pair_of(at, 3)
            a, b, c, d = splat(read(x0 + i)), splat(read(x1 + i)), splat(read(x2 + i)), splat(read(x3 + i))
            a0, a1 = multiply_add(a, u0, a0), multiply_add(a, u1, a1)
            a2, a3 = multiply_add(a, u2, a2), multiply_add(a, u3, a3)
            b0, b1 = multiply_add(b, u0, b0), multiply_add(b, u1, b1)
            b2, b3 = multiply_add(b, u2, b2), multiply_add(b, u3, b3)
            c0, c1 = multiply_add(c, u0, c0), multiply_add(c, u1, c1)
            c2, c3 = multiply_add(c, u2, c2), multiply_add(c, u3, c3)
            d0, d1 = multiply_add(d, u0, d0), multiply_add(d, u1, d1)
            d2, d3 = multiply_add(d, u2, d2), multiply_add(d, u3, d3)
            if pair * 2 + 1 < depth:
                i += 4
                a, b = splat(read(x0 + i)), splat(read(x1 + i))
                c, d = splat(read(x2 + i)), splat(read(x3 + i))
                a0, a1 = multiply_add(a, v0, a0), multiply_add(a, v1, a1)
                a2, a3 = multiply_add(a, v2, a2), multiply_add(a, v3, a3)
                b0, b1 = multiply_add(b, v0, b0), multiply_add(b, v1, b1)
                b2, b3 = multiply_add(b, v2, b2), multiply_add(b, v3, b3)
                c0, c1 = multiply_add(c, v0, c0), multiply_add(c, v1, c1)
                c2, c3 = multiply_add(c, v2, c2), multiply_add(c, v3, c3)
                d0, d1 = multiply_add(d, v0, d0), multiply_add(d, v1, d1)
                d2, d3 = multiply_add(d, v2, d2), multiply_add(d, v3, d3)
        store_four(to, a0, a1, a2, a3)
        store_four(to + STEP_BYTES, b0, b1, b2, b3)
        store_four(to + 2 * STEP_BYTES, c0, c1, c2, c3)
        store_four(to + 3 * STEP_BYTES, d0, d1, d2, d3)

    return four


_bfloat16_panel = any_rows(_one_row(_bfloat16_pair), _four_rows(_bfloat16_pair))
_float16_panel = any_rows(_one_row(_float16_pair), _four_rows(_float16_pair))
_rounded_panel = stepwise_product(load_ints, load_splat, dot_bfloat16)


@njit(inline="never")
def half_panel_product(form, to, x, x_row, rows, w, depth, soon):  # type: ignore[no-untyped-def]
    """Computes the product of any rows and a panel of 16 bits, as `any_rows` describes it. form: that of the
    panel; ROUNDED if rows are bfloat16, too, and end with a zero if their depth is odd."""
    if form == ROUNDED:
        _rounded_panel(to, x, x_row, rows, w, (depth + 1) // 2, soon)
    elif form == BFLOAT16:
        _bfloat16_panel(to, x, x_row, rows, w, depth, soon)
    else:
        _float16_panel(to, x, x_row, rows, w, depth, soon)


@njit(inline="never")
def _put(to, to_row, sums, bias, base, base_row, rows, width):  # type: ignore[no-untyped-def]
    """Stores sums [rows, 64] + bias [64], the first `width` columns; and base, if its address is not 0."""
    whole = width // LANES * VECTOR
    for r in range(rows):
        at, s, under = to + r * to_row, sums + r * STEP_BYTES, base + r * base_row
        for i in range(0, whole, VECTOR):
            value = add(load(s + i), load(bias + i))
            store(at + i, value if base == 0 else add(load(under + i), value))
        for i in range(whole, width * 4, 4):
            one = read(s + i) + read(bias + i)
            write(at + i, one if base == 0 else read(under + i) + one)


class _ProductArguments(ctypes.Structure):
    """The arguments of out [rows, width] = [base +] x [rows, depth] · weightᵀ + bias. Rows of out, x and base
    are their `_row` bytes apart. base: 0 for none. bias: with room for whole panels."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("next", "form", "panels", "count", "stride", "depth", "width")),
        *((name, ctypes.c_int64) for name in ("bias", "out", "out_row", "x", "x_row", "rows")),
        *((name, ctypes.c_int64) for name in ("base", "base_row")),
    ]


@kernel(_ProductArguments)
def _product(pointer):  # type: ignore[no-untyped-def]
    a = carray(pointer, 1)[0]
    scratch = np.empty((_BLOCK + 4) * PANEL + LANES, np.float32)
    sums, item = aligned(scratch), fetch_add(address_of(pointer), 1)
    while item < a.count:
        coming = fetch_add(address_of(pointer), 1)
        w, column = a.panels + item * a.stride, item * STEP_BYTES
        width = min(PANEL, a.width - item * PANEL)
        for r in range(0, a.rows, _BLOCK):
            rows, x = min(_BLOCK, a.rows - r), a.x + r * a.x_row
            soon = w if r + rows < a.rows or coming >= a.count else a.panels + coming * a.stride
            half_panel_product(a.form, sums, x, a.x_row, rows, w, a.depth, soon)
            base = 0 if a.base == 0 else a.base + r * a.base_row + column
            _put(
                a.out + r * a.out_row + column,
                a.out_row,
                sums,
                a.bias + column,
                base,
                a.base_row,
                rows,
                width,
            )
        item = coming
    scratch[0] = 0  # see `aligned`


@njit(inline="never")
def widen_row(to, source, size, form):  # type: ignore[no-untyped-def]
    """Copies `size` neighbours of 16 bits as float32."""
    whole = size // LANES * LANES
    for i in range(0, whole, LANES):
        at = source + i * 2
        store(to + i * 4, load_bfloat16(at) if form == BFLOAT16 else load_float16(at))
    for i in range(whole, size):
        at = source + i * 2
        write(to + i * 4, read_bfloat16(at) if form == BFLOAT16 else read_float16(at))


@njit(inline="never")
def round_row(to, source, size):  # type: ignore[no-untyped-def]
    """Copies `size` neighbours of float32, rounded to bfloat16."""
    whole = size // LANES * LANES
    for i in range(0, whole, LANES):
        store_bfloat16(to + i * 2, load(source + i * 4))
    for i in range(whole, size):
        write_bfloat16(to + i * 2, read(source + i * 4))


@njit(inline="never")
def widen_output(to, panels, stride, output, depth, form):  # type: ignore[no-untyped-def]
    """Copies the weights of one output from panels as float32."""
    column = output % PANEL
    at = panels + output // PANEL * stride
    for k in range(depth):
        pair = at + k // 2 * STEP_BYTES
        if form == BFLOAT16:
            write(to + k * 4, read_bfloat16(pair + column * 4 + k % 2 * 2))
        else:
            write(to + k * 4, read_float16(pair + column * 2 + k % 2 * (PANEL * 2)))


class _RowsArguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("next", "form", "panels", "stride", "depth")),
        *((name, ctypes.c_int64) for name in ("outputs", "rows", "out", "out_row")),
    ]


@kernel(_RowsArguments)
def _rows(pointer):  # type: ignore[no-untyped-def]
    a = carray(pointer, 1)[0]
    row = fetch_add(address_of(pointer), 1)
    while row < a.rows:
        output = read_int(a.outputs + row * 4)
        widen_output(a.out + row * a.out_row, a.panels, a.stride, output, a.depth, a.form)
        row = fetch_add(address_of(pointer), 1)


class HalfPanels:
    """A weight [N, K] of 16 bits in panels."""

    def __init__(self, weight: Tensor) -> None:
        """Copies the weight, and keeps nothing else of it. Raises ValueError if it is of no format of 16
        bits."""
        check("weight", weight, *weight.shape, dtypes=(torch.bfloat16, torch.float16))
        self.width, self.depth = weight.shape
        self.dtype = weight.dtype
        self._rounds = ctypes.c_int64(0)  # which kernels read
        self.form = FORMATS[weight.dtype]
        self.count, pairs = -(-self.width // PANEL), -(-self.depth // 2)
        self.stride = pairs * STEP_BYTES
        self.data = torch.empty(self.count, pairs, 2 * PANEL, dtype=weight.dtype)
        for panel, part in zip(self.data, torch.split(weight, PANEL), strict=True):
            rows = functional.pad(part, (0, self.depth % 2, 0, PANEL - len(part)))
            if self.form == BFLOAT16:
                panel.view(torch.int32).copy_(rows.contiguous().view(torch.int32).t())
            else:
                panel.view(-1, PANEL).copy_(rows.t())

    @property
    def address(self) -> int:
        return self.data.data_ptr()

    def dense(self) -> Tensor:
        """Returns the weight [N, K]."""
        held = self.data.view(self.count, -1, 2, PANEL)
        if self.form == BFLOAT16:
            held = self.data.view(self.count, -1, PANEL, 2).transpose(2, 3)
        return held.flatten(1, 2).transpose(1, 2).flatten(0, 1)[: self.width, : self.depth].contiguous()

    @property
    def rounds(self) -> bool:
        """Returns whether products round their inputs to bfloat16 first, the weight's format."""
        return bool(self._rounds.value)

    @property
    def rounds_at(self) -> int:
        """Returns the address at which kernels read `rounds`."""
        return ctypes.addressof(self._rounds)

    def round_inputs(self) -> None:
        """Lets products round their inputs from now on, if that is quicker here."""
        self._rounds.value = HAS_BFLOAT16_DOT and self.form == BFLOAT16

    def product(self, x: Tensor, bias: Tensor, base: Tensor | None = None) -> Tensor:
        """Returns [base [n, N] +] x [n, K] · weightᵀ + bias, all float32. bias has room for whole panels.
        Rows of x and base may lie anywhere."""
        rows, form = len(x), self.form
        check("x", x, rows, self.depth, dtypes=(torch.float32,))
        if self.rounds:
            x, form = functional.pad(x.to(torch.bfloat16), (0, self.depth % 2)), ROUNDED
        check("bias", bias, self.count * PANEL, dtypes=(torch.float32,))
        out = torch.empty(rows, self.width)
        if base is not None:
            check("base", base, rows, self.width, dtypes=(torch.float32,))
        under = (0, 0) if base is None else (base.data_ptr(), base.stride(0) * 4)
        arguments = _ProductArguments(
            0, form, self.address, self.count, self.stride, self.depth, self.width, bias.data_ptr(),
            out.data_ptr(), out.stride(0) * 4, x.data_ptr(), x.stride(0) * x.itemsize, rows, *under,
        )  # fmt: skip
        _product(arguments, torch.get_num_threads())
        return out

    def rows(self, outputs: Tensor) -> Tensor:
        """Returns the weights of these outputs, int32 [n], as float32 [n, K]."""
        check("outputs", outputs, len(outputs), dtypes=(torch.int32,))
        out = torch.empty(len(outputs), self.depth)
        arguments = _RowsArguments(
            0, self.form, self.address, self.stride, self.depth,
            outputs.data_ptr(), len(outputs), out.data_ptr(), out.stride(0) * 4,
        )  # fmt: skip
        _rows(arguments, torch.get_num_threads() if len(outputs) > _FEW_ROWS else 1)
        return out
