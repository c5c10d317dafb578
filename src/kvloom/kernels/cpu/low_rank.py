"""Low-rank adapters in the one-kernel step (LoRA): before a product a stage computes low = scale · x · Aᵀ
for the rows that have an adapter, and each of the product's panels adds its part of low · Bᵀ to these rows.

Rows come in runs that have one adapter. An item of the stage is a slice of one run's outputs, so that few
rows are shared out among threads, too, and a weight is read once for all rows of a run.
`reference.low_rank` is the plain twin of both parts together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import carray, njit

from kvloom.kernels.cpu.half import FLOAT16, FLOAT32
from kvloom.kernels.cpu.lanes.floats import (
    LANES,
    load,
    load_bfloat16,
    load_float16,
    multiply_add,
    read_bfloat16,
    read_float16,
    splat,
    store,
    total,
    variant,
)
from kvloom.kernels.cpu.memory import fetch_add, observe, pointer_at, read, read_int, rest, write
from kvloom.kernels.cpu.panels import PANEL

LOW_STAGES: Final = 4  # inputs of a layer's products: those of qkv, of o, of gate and up, of down
RECORD: Final = 16
"""Numbers of an adapter's record of a layer: for each stage the address of A [rank, K], then for each its
rank; then for each of the layer's five products the address of a table [panels, 3] of the address of what a
panel has of B [count, 64], the first of low's columns that it reads, and `count`. An address is 0 if there is
nothing."""
RANK, TABLE = LOW_STAGES, 2 * LOW_STAGES
QKV, O, GATE, UP, DOWN = range(5)  # noqa: E741 -- as the layer is called
_RECORD_BYTES = RECORD * 8
_RUN_BYTES = 4 * 8
_TABLE_BYTES = 3 * 8
_SUMS = PANEL * 4
_STEP = LANES * 4


class LowRankArguments(ctypes.Structure):
    """The adapters of a step's rows. runs [count, 4] of int64: the address of an adapter's records, a layer
    each; the first of its rows in `order`, their number, and the number format of its weights, as in
    `half.FORMATS`. scales [count] of float32; order [rows] of int32. low: rows of float32, low_row bytes
    apart. slices: the items of a run."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("runs", "count", "scales", "order", "low", "low_row", "slices"))
    ]


_ARGUMENTS = np.dtype(LowRankArguments)


def _dots_over(lanes_at: Callable[..., Any], one_at: Callable[..., Any], size: int) -> Any:
    """Makes the products of a row and some rows of A. lanes_at, one_at: load weights of `size` bytes."""
    step = LANES * size

    @variant(lanes_at)
    def dots(to, x, a, begin, end, depth, scale):  # type: ignore[no-untyped-def]
        whole, row = depth // LANES, depth * size
        r = begin
        while r + 4 <= end:
            a0 = a + r * row
            a1, a2, a3 = a0 + row, a0 + 2 * row, a0 + 3 * row
            s0 = s1 = s2 = s3 = splat(0.0)
            for i in range(whole):
                v, at = load(x + i * _STEP), i * step
                s0, s1 = multiply_add(v, lanes_at(a0 + at), s0), multiply_add(v, lanes_at(a1 + at), s1)
                s2, s3 = multiply_add(v, lanes_at(a2 + at), s2), multiply_add(v, lanes_at(a3 + at), s3)
            t0, t1, t2, t3 = total(s0), total(s1), total(s2), total(s3)
            for i in range(whole * LANES, depth):
                one, at = read(x + i * 4), i * size
                t0, t1 = t0 + one * one_at(a0 + at), t1 + one * one_at(a1 + at)
                t2, t3 = t2 + one * one_at(a2 + at), t3 + one * one_at(a3 + at)
            write(to + r * 4, t0 * scale)
            write(to + r * 4 + 4, t1 * scale)
            write(to + r * 4 + 8, t2 * scale)
            write(to + r * 4 + 12, t3 * scale)
            r += 4
        while r < end:
            a0 = a + r * row
            s0 = splat(0.0)
            for i in range(whole):
                s0 = multiply_add(load(x + i * _STEP), lanes_at(a0 + i * step), s0)
            t0 = total(s0)
            for i in range(whole * LANES, depth):
                t0 += read(x + i * 4) * one_at(a0 + i * size)
            write(to + r * 4, t0 * scale)
            r += 1

    return dots


def _addition_of(lanes_at: Callable[..., Any], size: int) -> Any:
    """Makes the sum of a row of 64 and low [count] · w [count, 64]."""
    step = LANES * size

    @variant(lanes_at)
    def addition(to, low, w, count):  # type: ignore[no-untyped-def]
        s0, s1 = load(to), load(to + _STEP)
        s2, s3 = load(to + 2 * _STEP), load(to + 3 * _STEP)
        for r in range(count):
            value, at = splat(read(low + r * 4)), w + r * 4 * step
            s0, s1 = multiply_add(value, lanes_at(at), s0), multiply_add(value, lanes_at(at + step), s1)
            s2 = multiply_add(value, lanes_at(at + 2 * step), s2)
            s3 = multiply_add(value, lanes_at(at + 3 * step), s3)
        store(to, s0)
        store(to + _STEP, s1)
        store(to + 2 * _STEP, s2)
        store(to + 3 * _STEP, s3)

    return addition


_dots = _dots_over(load, read, 4)
_bfloat16_dots = _dots_over(load_bfloat16, read_bfloat16, 2)
_float16_dots = _dots_over(load_float16, read_float16, 2)
_addition = _addition_of(load, 4)
_bfloat16_addition = _addition_of(load_bfloat16, 2)
_float16_addition = _addition_of(load_float16, 2)


@njit(inline="never")
def low_products(adapted, layer, stage, inputs, depth, counters):  # type: ignore[no-untyped-def]
    """A stage: low = scale · inputs · Aᵀ of the rows that have an adapter. adapted: the address of
    LowRankArguments; inputs: an address, and the bytes between rows."""
    a = carray(pointer_at(adapted), 1, _ARGUMENTS)[0]
    x, x_row = inputs
    items = a.count * a.slices
    item = fetch_add(counters, 1)
    while item < items:
        at, part = item // a.slices, item % a.slices
        run = carray(pointer_at(a.runs + at * _RUN_BYTES), 4, np.int64)
        record = carray(pointer_at(run[0] + layer * _RECORD_BYTES), RECORD, np.int64)
        weight, rank, scale = record[stage], record[RANK + stage], read(a.scales + at * 4)
        begin, end = rank * part // a.slices, rank * (part + 1) // a.slices
        for i in range(run[1], run[1] + run[2]):
            row = read_int(a.order + i * 4)
            to, values = a.low + row * a.low_row, x + row * x_row
            if run[3] == FLOAT32:
                _dots(to, values, weight, begin, end, depth, scale)
            elif run[3] == FLOAT16:
                _float16_dots(to, values, weight, begin, end, depth, scale)
            else:
                _bfloat16_dots(to, values, weight, begin, end, depth, scale)
        fetch_add(counters + 8, 1)
        item = fetch_add(counters, 1)
    turns = 0
    while observe(counters + 8) < items:
        turns += 1
        rest(turns)


@njit(inline="never")
def add_low_rank(adapted, layer, which, panel, sums):  # type: ignore[no-untyped-def]
    """Adds low · Bᵀ to the sums [rows, 64] of a panel of one of the layer's products."""
    a = carray(pointer_at(adapted), 1, _ARGUMENTS)[0]
    for at in range(a.count):
        run = carray(pointer_at(a.runs + at * _RUN_BYTES), 4, np.int64)
        table = carray(pointer_at(run[0] + layer * _RECORD_BYTES), RECORD, np.int64)[TABLE + which]
        if table == 0:
            continue
        part = carray(pointer_at(table + panel * _TABLE_BYTES), 3, np.int64)
        weight, count = part[0], part[2]
        for i in range(run[1], run[1] + run[2]):
            row = read_int(a.order + i * 4)
            to, low = sums + row * _SUMS, a.low + row * a.low_row + part[1] * 4
            if run[3] == FLOAT32:
                _addition(to, low, weight, count)
            elif run[3] == FLOAT16:
                _float16_addition(to, low, weight, count)
            else:
                _bfloat16_addition(to, low, weight, count)
