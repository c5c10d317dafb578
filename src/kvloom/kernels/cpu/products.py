"""The stages of the one-kernel step that are products: an item is a run of panels.

Items are handed out by a counter, and a stage is over when as many are done. `poll` is the address that
another unit's tasks come by, 0 for none; a thread looks for one between `parts` parts of all items that are
as even as items allow.
"""

from __future__ import annotations

from numba import njit

from kvloom.kernels.cpu.attention import score
from kvloom.kernels.cpu.elementwise import copy_row, norm_row
from kvloom.kernels.cpu.memory import fetch_add, observe, prefetch, read, rest
from kvloom.kernels.cpu.offload_serve import look_when_due
from kvloom.kernels.cpu.vector import (
    LANES,
    add,
    divide,
    exponential,
    load,
    multiply,
    multiply_add,
    splat,
    store,
    subtract,
    tanh,
)

PANEL = 64  # columns
_BYTES = PANEL * 4
_STEP = LANES * 4
_AHEAD = 24  # inputs whose weights are on their way


@njit(inline="always")
def _fetch(w, step, depth, soon):  # type: ignore[no-untyped-def]
    """Fetches the weights of the input that is `_AHEAD` of this one."""
    ahead = step + _AHEAD
    at = w + ahead * _BYTES if ahead < depth else soon + (ahead - depth) * _BYTES
    for line in range(0, _BYTES, _STEP):
        prefetch(at + line)


@njit(inline="always")
def _keep(to, s0, s1, s2, s3):  # type: ignore[no-untyped-def]
    store(to, s0)
    store(to + _STEP, s1)
    store(to + 2 * _STEP, s2)
    store(to + 3 * _STEP, s3)


@njit(inline="never")
def _one(to, x, w, depth, soon):  # type: ignore[no-untyped-def]
    s0 = s1 = s2 = s3 = splat(0.0)
    for k in range(depth):
        _fetch(w, k, depth, soon)
        at, value = w + k * _BYTES, splat(read(x + k * 4))
        s0 = multiply_add(value, load(at), s0)
        s1 = multiply_add(value, load(at + _STEP), s1)
        s2 = multiply_add(value, load(at + 2 * _STEP), s2)
        s3 = multiply_add(value, load(at + 3 * _STEP), s3)
    _keep(to, s0, s1, s2, s3)


@njit(inline="never")
def _four(to, x0, x1, x2, x3, w, depth, soon):  # type: ignore[no-untyped-def]
    a0 = a1 = a2 = a3 = splat(0.0)
    b0 = b1 = b2 = b3 = splat(0.0)
    c0 = c1 = c2 = c3 = splat(0.0)
    d0 = d1 = d2 = d3 = splat(0.0)
    for k in range(depth):
        _fetch(w, k, depth, soon)
        at, i = w + k * _BYTES, k * 4
        w0, w1, w2, w3 = load(at), load(at + _STEP), load(at + 2 * _STEP), load(at + 3 * _STEP)
        a, b, c, d = splat(read(x0 + i)), splat(read(x1 + i)), splat(read(x2 + i)), splat(read(x3 + i))
        a0, a1 = multiply_add(a, w0, a0), multiply_add(a, w1, a1)
        a2, a3 = multiply_add(a, w2, a2), multiply_add(a, w3, a3)
        b0, b1 = multiply_add(b, w0, b0), multiply_add(b, w1, b1)
        b2, b3 = multiply_add(b, w2, b2), multiply_add(b, w3, b3)
        c0, c1 = multiply_add(c, w0, c0), multiply_add(c, w1, c1)
        c2, c3 = multiply_add(c, w2, c2), multiply_add(c, w3, c3)
        d0, d1 = multiply_add(d, w0, d0), multiply_add(d, w1, d1)
        d2, d3 = multiply_add(d, w2, d2), multiply_add(d, w3, d3)
    _keep(to, a0, a1, a2, a3)
    _keep(to + _BYTES, b0, b1, b2, b3)
    _keep(to + 2 * _BYTES, c0, c1, c2, c3)
    _keep(to + 3 * _BYTES, d0, d1, d2, d3)


@njit(inline="never")
def panel_product(to, x, x_row, rows, w, depth, soon):  # type: ignore[no-untyped-def]
    """Computes to [rows up to fours, 64] = x [rows, K] · w [K, 64]. The last of four rows may be repeated."""
    last = x + (rows - 1) * x_row
    if rows == 1:
        _one(to, x, w, depth, soon)
    else:
        for r in range(0, rows, 4):
            x0 = x + r * x_row
            x1, x2, x3 = min(x0 + x_row, last), min(x0 + 2 * x_row, last), min(x0 + 3 * x_row, last)
            _four(to + r * _BYTES, x0, x1, x2, x3, w, depth, soon if r + 4 >= rows else w)


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
    for r in range(rows):
        norm_row(to + r * to_row, x + r * x_row, norm.weight, size, norm.eps, norm.offset)


@njit(inline="never")
def _put(to, to_row, sums, bias, rows, onto):  # type: ignore[no-untyped-def]
    """Stores sums [rows, 64] + bias [64]; onto what is there, if asked."""
    for r in range(rows):
        for i in range(0, _BYTES, LANES * 4):
            at = to + r * to_row + i
            value = add(load(sums + r * _BYTES + i), load(bias + i))
            store(at, add(load(at), value) if onto else value)


@njit(inline="always")
def _from(linear, item, then):  # type: ignore[no-untyped-def]
    """Returns the address of an item's weights; past the last item, that of the next stage's."""
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
    """Computes to = activation(gates [rows, 64]) ∘ ups."""
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
