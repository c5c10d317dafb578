"""The stages of the one-kernel step that are products: an item is a run of panels.

Items are handed out by a counter, and a stage is over when as many are done. `poll` is the address that
another unit's tasks come by, 0 for none; a thread looks for one between `parts` parts of all items that are
as even as items allow.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numba import carray, njit

from kvloom.kernels.cpu.attention.tile import score
from kvloom.kernels.cpu.elementwise import copy_row, norm_row
from kvloom.kernels.cpu.half import FLOAT32, ROUNDED, half_panel_product, round_row
from kvloom.kernels.cpu.lanes.floats import (
    add,
    divide,
    exponential,
    load,
    multiply,
    splat,
    store,
    subtract,
    tanh,
    write_bfloat16,
)
from kvloom.kernels.cpu.low_rank import GATE, UP, add_low_rank
from kvloom.kernels.cpu.memory import fetch_add, observe, pointer_at, rest
from kvloom.kernels.cpu.offload_serve import look_when_due
from kvloom.kernels.cpu.panels import PANEL, STEP_BYTES, VECTOR, panel_product
from kvloom.kernels.cpu.quantized.panels import SUMS_ROW, rows_by_panel
from kvloom.kernels.cpu.quantized.rows import make_row_ready, weight_at


class ItemArguments(ctypes.Structure):
    """Describes an item of a quantised weight, up to 64 neighbouring outputs: one panel or two, their
    address, and the byte at which a row that is ready has what they read."""

    _fields_ = [(name, ctypes.c_int64) for name in ("weight", "panels", "count", "at")]


class ReadyArguments(ctypes.Structure):
    """Says what a stage makes of its inputs before it multiplies, at the byte `at` of a row that is ready:
    codes for a quantised weight; if that is 0, `depth` bfloat16, but only if there is no 0 at the address
    `rounds`."""

    _fields_ = [(name, ctypes.c_int64) for name in ("weight", "at", "rounds", "depth")]


_ITEM, _PART = np.dtype(ItemArguments), np.dtype(ReadyArguments)
QUANTIZED = 3  # a number format of panels, after those of `half.FORMATS`


@njit(inline="never")
def make_ready(linear, x, x_row, rows, ready, ready_row):  # type: ignore[no-untyped-def]
    """Makes of rows of float32 what the products of the stage that `linear` is of read in their place."""
    for one in carray(pointer_at(linear.parts), linear.part_count, _PART):
        if one.weight != 0:
            weight = weight_at(one.weight)
            for r in range(rows):
                make_row_ready(weight, x + r * x_row, ready + r * ready_row + one.at)
        elif observe(one.rounds) != 0:
            for r in range(rows):
                round_row(ready + r * ready_row + one.at, x + r * x_row, one.depth)
                if one.depth % 2:
                    write_bfloat16(ready + r * ready_row + one.at + one.depth * 2, np.float32(0))


@njit(inline="never")
def _item_product(item, to, x, x_row, ready, ready_row, rows, soon):  # type: ignore[no-untyped-def]
    """Computes to [rows, 64] over an item of a quantised weight; zeros past its panel if it has one. item:
    the address of ItemArguments."""
    one = carray(pointer_at(item), 1, _ITEM)[0]
    a, ready = weight_at(one.weight), ready + one.at
    if one.count == 1:
        rows_by_panel(a, one.panels, x, x_row, ready, ready_row, rows, to, soon)
        for r in range(rows):
            store(to + r * SUMS_ROW + 2 * VECTOR, splat(0.0))
            store(to + r * SUMS_ROW + 3 * VECTOR, splat(0.0))
    else:
        then = one.panels + a.stride
        rows_by_panel(a, one.panels, x, x_row, ready, ready_row, rows, to, then)
        rows_by_panel(a, then, x, x_row, ready, ready_row, rows, to + 2 * VECTOR, soon)


@njit(inline="never")
def _panel(linear, item, to, x, x_row, ready, ready_row, rows, soon):  # type: ignore[no-untyped-def]
    """Computes to [rows up to fours, 64] = x [rows, K] · w [K, 64] of an item of any format."""
    form, w = linear.form, linear.panels + item * linear.stride
    if form == FLOAT32:
        panel_product(to, x, x_row, rows, w, linear.depth, soon)
    elif form == QUANTIZED:
        _item_product(w, to, x, x_row, ready, ready_row, rows, soon)
    elif linear.rounds != 0 and observe(linear.rounds) != 0:
        half_panel_product(ROUNDED, to, ready + linear.at, ready_row, rows, w, linear.depth, soon)
    else:
        half_panel_product(form, to, x, x_row, rows, w, linear.depth, soon)


SWISH, GELU = 0, 1


@njit(inline="never")
def wait(counters, items):  # type: ignore[no-untyped-def]
    """Waits until all items of a stage are done."""
    turns = 0
    while observe(counters + 8) < items:
        turns += 1
        rest(turns)


@njit(inline="never")
def normalise(to, to_row, x, x_row, rows, size, norm):  # type: ignore[no-untyped-def]
    """Computes RMSNorm of rows. norm: NormArguments."""
    for r in range(rows):
        norm_row(to + r * to_row, x + r * x_row, norm.weight, size, norm.eps, norm.offset)


@njit(inline="never")
def _put(to, to_row, sums, bias, rows, onto):  # type: ignore[no-untyped-def]
    """Stores sums [rows, 64] + bias [64]; onto what is there, if asked."""
    for r in range(rows):
        for i in range(0, STEP_BYTES, VECTOR):
            at = to + r * to_row + i
            value = add(load(sums + r * STEP_BYTES + i), load(bias + i))
            store(at, add(load(at), value) if onto else value)


@njit(inline="never")
def _weights(linear, item):  # type: ignore[no-untyped-def]
    """Returns the address of an item's weights; of the last one's past the end."""
    at = linear.panels + min(item, linear.count - 1) * linear.stride
    return carray(pointer_at(at), 1, _ITEM)[0].panels if linear.form == QUANTIZED else at


@njit(inline="always")
def _from(linear, item, then):  # type: ignore[no-untyped-def]
    """Returns the address of an item's weights; past the last item, that of the next stage's."""
    return _weights(linear, item) if item < linear.count else _weights(then, item - linear.count)


@njit(inline="never")
def product(  # type: ignore[no-untyped-def]
    linear, then, out, inputs, rows, onto, counters, scratch, poll, parts, low
):
    """Runs a stage: out = [out +] inputs · weightᵀ + bias. out, inputs: an address, and the bytes between
    rows. scratch: the address of sums, and that and the bytes of rows that are ready. low: the address of the
    adapters' arguments, 0 if no row has one, the layer, and which of its products this is."""
    (to, to_row), (x, x_row), (sums, ready, ready_row) = out, inputs, scratch
    adapted, layer, which = low
    item, taken = fetch_add(counters, 1), 0
    if item < linear.count:
        make_ready(linear, x, x_row, rows, ready, ready_row)
    while item < linear.count:
        coming = fetch_add(counters, 1)
        soon = _from(linear, coming, then)
        _panel(linear, item, sums, x, x_row, ready, ready_row, rows, soon)
        if adapted != 0:
            add_low_rank(adapted, layer, which, item, sums)
        _put(to + item * STEP_BYTES, to_row, sums, linear.bias + item * STEP_BYTES, rows, onto)
        fetch_add(counters + 8, 1)
        taken += 1
        look_when_due(poll, taken, linear.count, parts)
        item = coming
    wait(counters, linear.count)


@njit(inline="never")
def _activate(to, to_row, gates, ups, rows, kind):  # type: ignore[no-untyped-def]
    """Computes to = activation(gates [rows, 64]) ∘ ups."""
    for r in range(rows):
        for i in range(0, STEP_BYTES, VECTOR):
            g = load(gates + r * STEP_BYTES + i)
            if kind == SWISH:
                g = divide(g, add(splat(1.0), exponential(subtract(splat(0.0), g))))
            else:  # GELU by tanh: sqrt(2 / pi) (g + 0.044715 g³)
                cube = multiply(multiply(g, g), multiply(g, splat(0.044715)))
                bend = tanh(multiply(splat(0.7978845608028654), add(g, cube)))
                g = multiply(multiply(g, splat(0.5)), add(splat(1.0), bend))
            store(to + r * to_row + i, multiply(g, load(ups + r * STEP_BYTES + i)))


@njit(inline="never")
def gated(layer, out, inputs, rows, counters, scratch, poll, parts, low):  # type: ignore[no-untyped-def]
    """Runs a stage: out = activation(gate(inputs)) ∘ up(inputs). low: the address of the adapters' arguments,
    and the layer."""
    (to, to_row), (x, x_row), (sums, ready, ready_row) = out, inputs, scratch
    gate, up, ups = layer.gate, layer.up, sums + (rows + 3) * STEP_BYTES
    item, taken = fetch_add(counters, 1), 0
    if item < gate.count:
        make_ready(gate, x, x_row, rows, ready, ready_row)
    while item < gate.count:
        coming = fetch_add(counters, 1)
        bias, soon = item * STEP_BYTES, _from(gate, coming, layer.down)
        _panel(gate, item, sums, x, x_row, ready, ready_row, rows, _weights(up, item))
        _panel(up, item, ups, x, x_row, ready, ready_row, rows, soon)
        if low[0] != 0:
            add_low_rank(low[0], low[1], GATE, item, sums)
            add_low_rank(low[0], low[1], UP, item, ups)
        _put(sums, STEP_BYTES, sums, gate.bias + bias, rows, False)
        _put(ups, STEP_BYTES, ups, up.bias + bias, rows, False)
        _activate(to + bias, to_row, sums, ups, rows, layer.activation)
        fetch_add(counters + 8, 1)
        taken += 1
        look_when_due(poll, taken, gate.count, parts)
        item = coming
    wait(counters, gate.count)


@njit(inline="never")
def plain_head(s, x, x_row, counters, sums, poll, parts):  # type: ignore[no-untyped-def]
    """Runs a stage: logits = x · weightᵀ of a weight [V, K] in plain rows, 64 of them an item."""
    items = (s.vocab + PANEL - 1) // PANEL
    item, taken = fetch_add(counters, 1), 0
    while item < items:
        count = min(PANEL, s.vocab - item * PANEL)
        score(sums, x, x_row, s.plain + item * PANEL * s.size * 4, count, s.kept_rows, s.size)
        for r in range(s.kept_rows):
            copy_row(s.logits + r * s.logits_row + item * STEP_BYTES, sums + r * STEP_BYTES, count * 4)
        fetch_add(counters + 8, 1)
        taken += 1
        look_when_due(poll, taken, items, parts)
        item = fetch_add(counters, 1)
    wait(counters, items)
