"""Stages of the one-kernel step: the products, a run of panels an item.

Items are handed out by a counter, and a stage is over when as many are done. `poll` is where another unit's
tasks come from, 0 for nowhere; a thread looks for one between `parts` parts of all items that are as even as
items allow.
"""

from numba import njit, types

from kvloom.kernels.attention_tile import score
from kvloom.kernels.cpu_look import look_when_due
from kvloom.kernels.memory import fetch_add, observe
from kvloom.kernels.panels import PANEL, panel_product
from kvloom.kernels.rows import copy_row, norm_row
from kvloom.kernels.vector import (
    LANES,
    add,
    divide,
    exponential,
    load,
    multiply,
    splat,
    store,
    subtract,
    tanh,
)

SWISH, GELU = 0, 1
_BYTES = PANEL * 4
_SPINS = 2000
_yield = types.ExternalFunction("sched_yield", types.int32())


@njit(inline="never")
def wait(counters, items):  # type: ignore[no-untyped-def]
    spins = 0
    while observe(counters + 8) < items:
        spins += 1
        if spins > _SPINS:
            _yield()


@njit(inline="never")
def normalise(to, to_row, x, x_row, rows, size, norm):  # type: ignore[no-untyped-def]
    for r in range(rows):
        norm_row(to + r * to_row, x + r * x_row, norm.weight, size, norm.eps, norm.offset)


@njit(inline="never")
def _put(to, to_row, sums, bias, rows, onto):  # type: ignore[no-untyped-def]
    """Store sums [rows, 64] + bias [64]; onto what is there, if asked."""
    for r in range(rows):
        for i in range(0, _BYTES, LANES * 4):
            at = to + r * to_row + i
            value = add(load(sums + r * _BYTES + i), load(bias + i))
            store(at, add(load(at), value) if onto else value)


@njit(inline="always")
def _from(linear, item, then):  # type: ignore[no-untyped-def]
    """Where an item's weights are; past the last item, where those of the next stage are."""
    if item < linear.count:
        return linear.panels + item * linear.stride
    return then.panels + (item - linear.count) * then.stride


@njit(inline="never")
def product(linear, then, to, to_row, x, x_row, rows, onto, counters, sums, poll, parts):  # type: ignore[no-untyped-def]
    """A stage: to = [to +] x · weightᵀ + bias."""
    item, taken = fetch_add(counters, 1), 0
    while item < linear.count:
        coming = fetch_add(counters, 1)
        w = linear.panels + item * linear.stride
        panel_product(sums, x, x_row, rows, w, linear.depth, _from(linear, coming, then))
        _put(to + item * _BYTES, to_row, sums, linear.bias + item * _BYTES, rows, onto)
        fetch_add(counters + 8, 1)
        taken += 1
        look_when_due(poll, taken, linear.count, parts)
        item = coming
    wait(counters, linear.count)


@njit(inline="never")
def _activate(to, to_row, gates, ups, rows, kind):  # type: ignore[no-untyped-def]
    """to = activation(gates [rows, 64]) ∘ ups."""
    for r in range(rows):
        for i in range(0, _BYTES, LANES * 4):
            g = load(gates + r * _BYTES + i)
            if kind == SWISH:
                g = divide(g, add(splat(1.0), exponential(subtract(splat(0.0), g))))
            else:  # GELU by tanh: sqrt(2 / pi) (g + 0.044715 g³)
                cube = multiply(multiply(g, g), multiply(g, splat(0.044715)))
                bend = tanh(multiply(splat(0.7978845608028654), add(g, cube)))
                g = multiply(multiply(g, splat(0.5)), add(splat(1.0), bend))
            store(to + r * to_row + i, multiply(g, load(ups + r * _BYTES + i)))


@njit(inline="never")
def gated(layer, to, to_row, x, x_row, rows, counters, sums, poll, parts):  # type: ignore[no-untyped-def]
    """A stage: to = activation(gate(x)) ∘ up(x)."""
    gate, up, ups = layer.gate, layer.up, sums + (rows + 3) * _BYTES
    item, taken = fetch_add(counters, 1), 0
    while item < gate.count:
        coming = fetch_add(counters, 1)
        w, bias = up.panels + item * up.stride, item * _BYTES
        panel_product(sums, x, x_row, rows, gate.panels + item * gate.stride, gate.depth, w)
        panel_product(ups, x, x_row, rows, w, up.depth, _from(gate, coming, layer.down))
        _put(sums, _BYTES, sums, gate.bias + bias, rows, False)
        _put(ups, _BYTES, ups, up.bias + bias, rows, False)
        _activate(to + bias, to_row, sums, ups, rows, layer.activation)
        fetch_add(counters + 8, 1)
        taken += 1
        look_when_due(poll, taken, gate.count, parts)
        item = coming
    wait(counters, gate.count)


@njit(inline="never")
def plain_head(s, x, x_row, counters, sums, poll, parts):  # type: ignore[no-untyped-def]
    """A stage: logits = x · weightᵀ of a weight [V, K] in plain rows, 64 of them an item."""
    items = (s.vocab + PANEL - 1) // PANEL
    item, taken = fetch_add(counters, 1), 0
    while item < items:
        count = min(PANEL, s.vocab - item * PANEL)
        score(sums, x, x_row, s.plain + item * PANEL * s.size * 4, count, s.kept_rows, s.size)
        for r in range(s.kept_rows):
            copy_row(s.logits + r * s.logits_row + item * _BYTES, sums + r * _BYTES, count * 4)
        fetch_add(counters + 8, 1)
        taken += 1
        look_when_due(poll, taken, items, parts)
        item = fetch_add(counters, 1)
    wait(counters, items)
