"""A whole decode step of few rows in one parallel region, on a CPU.

Few rows are bound by reading weights, and by the way between the products: so the team is woken once, and
walks through the layers by itself. A stage's work items are handed out by a counter, and the stage is over
when as many are done: a thread that comes late finds the work done by the others, and holds nobody up.
"""

import ctypes

import numpy as np
from numba import carray, njit, types

from kvloom.kernels.attention_tile import score
from kvloom.kernels.cpu_attention import AttentionArguments, attend
from kvloom.kernels.panels import PANEL, panel_product
from kvloom.kernels.parallel import kernel
from kvloom.kernels.rows import copy_row, norm_row
from kvloom.kernels.vector import (
    LANES,
    add,
    divide,
    exponential,
    fetch_add,
    load,
    multiply,
    observe,
    pointer_at,
    read_int,
    splat,
    store,
    subtract,
    tanh,
)

COUNTERS = 16  # 64-bit words a stage: `next` and `done`, alone in their cache lines
STAGES = 5  # a layer; before the first the embedding, after the last the head
SWISH, GELU = 0, 1
_BYTES = PANEL * 4
_LINE = 64
_SPINS = 2000
_yield = types.ExternalFunction("sched_yield", types.int32())


class LinearArguments(ctypes.Structure):
    """`count` panels of 64 columns over `depth` inputs, `stride` bytes each; bias has 64 · count values."""

    _fields_ = [(name, ctypes.c_int64) for name in ("panels", "count", "stride", "depth", "bias")]


class NormArguments(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_int64), ("eps", ctypes.c_double), ("offset", ctypes.c_double)]


class LayerArguments(ctypes.Structure):
    _fields_ = [
        *((name, NormArguments) for name in ("before", "between")),
        *((name, LinearArguments) for name in ("qkv", "o", "gate", "up", "down")),
        ("activation", ctypes.c_int64),
    ]


class StepArguments(ctypes.Structure):
    """Addresses and sizes. Rows of x, qkv, mixed, inner and logits are their `_row` bytes apart, and all but
    mixed have room for whole panels. plain: the head's weight [V, K] where it is not in panels, else 0."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("counters", "layers", "attention", "depth", "rows", "size")),
        *((name, ctypes.c_int64) for name in ("tokens", "embedding", "x", "x_row", "qkv", "qkv_row")),
        *((name, ctypes.c_int64) for name in ("mixed", "mixed_row", "inner", "inner_row")),
        *((name, ctypes.c_int64) for name in ("kept", "kept_rows", "logits", "logits_row", "plain", "vocab")),
        ("norm", NormArguments),
        ("head", LinearArguments),
    ]


_LAYER = np.dtype(LayerArguments)
_ATTENTION = np.dtype(AttentionArguments)
_ATTENTION_BYTES = ctypes.sizeof(AttentionArguments)


@njit(inline="never")
def _wait(counters, items):  # type: ignore[no-untyped-def]
    spins = 0
    while observe(counters + 8) < items:
        spins += 1
        if spins > _SPINS:
            _yield()


@njit(inline="never")
def _normalise(to, to_row, x, x_row, rows, size, norm):  # type: ignore[no-untyped-def]
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
def _product(linear, then, to, to_row, x, x_row, rows, onto, counters, sums):  # type: ignore[no-untyped-def]
    """A stage: to = [to +] x · weightᵀ + bias."""
    item = fetch_add(counters, 1)
    while item < linear.count:
        coming = fetch_add(counters, 1)
        w = linear.panels + item * linear.stride
        panel_product(sums, x, x_row, rows, w, linear.depth, _from(linear, coming, then))
        _put(to + item * _BYTES, to_row, sums, linear.bias + item * _BYTES, rows, onto)
        fetch_add(counters + 8, 1)
        item = coming
    _wait(counters, linear.count)


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
def _gated(layer, to, to_row, x, x_row, rows, counters, sums):  # type: ignore[no-untyped-def]
    """A stage: to = activation(gate(x)) ∘ up(x)."""
    gate, up, ups = layer.gate, layer.up, sums + (rows + 3) * _BYTES
    item = fetch_add(counters, 1)
    while item < gate.count:
        coming = fetch_add(counters, 1)
        w, bias = up.panels + item * up.stride, item * _BYTES
        panel_product(sums, x, x_row, rows, gate.panels + item * gate.stride, gate.depth, w)
        panel_product(ups, x, x_row, rows, w, up.depth, _from(gate, coming, layer.down))
        _put(sums, _BYTES, sums, gate.bias + bias, rows, False)
        _put(ups, _BYTES, ups, up.bias + bias, rows, False)
        _activate(to + bias, to_row, sums, ups, rows, layer.activation)
        fetch_add(counters + 8, 1)
        item = coming
    _wait(counters, gate.count)


@njit(inline="never")
def _plain_head(s, x, x_row, counters, sums):  # type: ignore[no-untyped-def]
    """A stage: logits = x · weightᵀ of a weight [V, K] in plain rows, 64 of them an item."""
    items = (s.vocab + PANEL - 1) // PANEL
    item = fetch_add(counters, 1)
    while item < items:
        count = min(PANEL, s.vocab - item * PANEL)
        score(sums, x, x_row, s.plain + item * PANEL * s.size * 4, count, s.kept_rows, s.size)
        for r in range(s.kept_rows):
            copy_row(s.logits + r * s.logits_row + item * _BYTES, sums + r * _BYTES, count * 4)
        fetch_add(counters + 8, 1)
        item = fetch_add(counters, 1)
    _wait(counters, items)


@njit(inline="never")
def _embed(s, counters):  # type: ignore[no-untyped-def]
    row = fetch_add(counters, 1)
    while row < s.rows:
        token = read_int(s.tokens + row * 4)
        copy_row(s.x + row * s.x_row, s.embedding + token * s.size * 4, s.size * 4)
        fetch_add(counters + 8, 1)
        row = fetch_add(counters, 1)
    _wait(counters, s.rows)


@njit(inline="never")
def _layer(s, layer, then, turn, next_token, counters, normal, sums):  # type: ignore[no-untyped-def]
    """`then` is the product after this layer's last."""
    step = COUNTERS * 8
    if observe(counters) < layer.qkv.count:
        _normalise(normal, s.x_row, s.x, s.x_row, s.rows, s.size, layer.before)
    _product(layer.qkv, layer.o, s.qkv, s.qkv_row, normal, s.x_row, s.rows, False, counters, sums)
    attend(turn, next_token)
    _wait(next_token, turn.batch * turn.spans)
    counters += 2 * step
    _product(layer.o, layer.gate, s.x, s.x_row, s.mixed, s.mixed_row, s.rows, True, counters, sums)
    counters += step
    if observe(counters) < layer.gate.count:
        _normalise(normal, s.x_row, s.x, s.x_row, s.rows, s.size, layer.between)
    _gated(layer, s.inner, s.inner_row, normal, s.x_row, s.rows, counters, sums)
    _product(layer.down, then, s.x, s.x_row, s.inner, s.inner_row, s.rows, True, counters + step, sums)


@kernel(StepArguments)
def step(pointer):  # type: ignore[no-untyped-def]
    s = carray(pointer, 1)[0]
    layers = carray(pointer_at(s.layers), s.depth, _LAYER)
    turns = carray(pointer_at(s.attention), s.depth, _ATTENTION)
    most = max(s.rows, s.kept_rows)
    scratch = np.empty(most * s.x_row // 4 + 2 * (most + 3) * PANEL + LANES, np.float32)
    normal = (scratch.ctypes.data + _LINE - 1) // _LINE * _LINE
    sums = normal + most * s.x_row
    counters = s.counters
    _embed(s, counters)
    counters += COUNTERS * 8
    for i in range(s.depth):
        layer = layers[i]
        then = layers[i + 1].qkv if i + 1 < s.depth else s.head
        _layer(s, layer, then, turns[i], s.attention + i * _ATTENTION_BYTES, counters, normal, sums)
        counters += STAGES * COUNTERS * 8
    for r in range(s.kept_rows):
        x = s.x + read_int(s.kept + r * 4) * s.x_row
        norm_row(normal + r * s.x_row, x, s.norm.weight, s.size, s.norm.eps, s.norm.offset)
    if s.plain != 0:
        _plain_head(s, normal, s.x_row, counters, sums)
    else:
        _product(s.head, s.head, s.logits, s.logits_row, normal, s.x_row, s.kept_rows, False, counters, sums)
    scratch[0] = 0  # numba frees an array after its last use, and addresses are none
