"""A whole decode step of few rows in one parallel region, on a CPU.

Few rows are bound by reading weights, and by the way between the products: so the team is woken once, and
walks through the layers by itself. A stage's work items are handed out by a counter, and the stage is over
when as many are done: a thread that comes late finds the work done by the others, and holds nobody up.

Where another unit's tasks may come, the thread that is first to enter looks for them: after each stage, and
so often within it as the plan of its parts says. No sum changes by that, and the others go on meanwhile.
"""

import ctypes

import numpy as np
from numba import carray, njit, types

from kvloom.kernels.attention_tile import score
from kvloom.kernels.cpu_attention import ALL, AttentionArguments, attend
from kvloom.kernels.cpu_poll import busy, look_for_task, nanoseconds
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
STAGES = OPERATORS = 5  # a layer; before the first the embedding, after the last the head
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
    mixed have room for whole panels. plain: the head's weight [V, K] where it is not in panels, else 0.

    poll: the PollArguments, or 0 where no tasks come. parts [OPERATORS · depth + 1]: those of each stage, the
    last the head. times, as long, and 4 words more: nanoseconds that they took in the thread that looks."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("counters", "layers", "attention", "depth", "rows", "size")),
        *((name, ctypes.c_int64) for name in ("tokens", "embedding", "x", "x_row", "qkv", "qkv_row")),
        *((name, ctypes.c_int64) for name in ("mixed", "mixed_row", "inner", "inner_row")),
        *((name, ctypes.c_int64) for name in ("kept", "kept_rows", "logits", "logits_row", "plain", "vocab")),
        *((name, ctypes.c_int64) for name in ("poll", "parts", "times", "threads")),
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


@njit(inline="never")
def _every(s, poll, stage, items):  # type: ignore[no-untyped-def]
    """Items of a stage between two looks of the thread that looks; the others never do."""
    if poll == 0:
        return ALL
    parts = carray(pointer_at(s.parts), OPERATORS * s.depth + 1, np.int64)[stage] * s.threads
    return (items + parts - 1) // parts


@njit(inline="never")
def _begin(s, poll):  # type: ignore[no-untyped-def]
    if poll != 0:
        stages = OPERATORS * s.depth + 1
        last = carray(pointer_at(s.times), stages + 4, np.int64)
        last[stages] = nanoseconds(s.times + (stages + 2) * 8)
        last[stages + 1] = busy(poll)


@njit(inline="never")
def _after(s, poll, stage):  # type: ignore[no-untyped-def]
    """A stage is over: note how long it took, less what was done for others in it."""
    if poll != 0:
        look_for_task(poll)
        stages = OPERATORS * s.depth + 1
        times = carray(pointer_at(s.times), stages + 4, np.int64)
        now, others = nanoseconds(s.times + (stages + 2) * 8), busy(poll)
        times[stage] = now - times[stages] - (others - times[stages + 1])
        times[stages], times[stages + 1] = now, others


@njit(inline="always")
def _from(linear, item, then):  # type: ignore[no-untyped-def]
    """Where an item's weights are; past the last item, where those of the next stage are."""
    if item < linear.count:
        return linear.panels + item * linear.stride
    return then.panels + (item - linear.count) * then.stride


@njit(inline="never")
def _product(linear, then, to, to_row, x, x_row, rows, onto, counters, sums, poll, every):  # type: ignore[no-untyped-def]
    """A stage: to = [to +] x · weightᵀ + bias."""
    item, taken = fetch_add(counters, 1), 0
    while item < linear.count:
        coming = fetch_add(counters, 1)
        w = linear.panels + item * linear.stride
        panel_product(sums, x, x_row, rows, w, linear.depth, _from(linear, coming, then))
        _put(to + item * _BYTES, to_row, sums, linear.bias + item * _BYTES, rows, onto)
        fetch_add(counters + 8, 1)
        taken += 1
        if taken % every == 0:
            look_for_task(poll)
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
def _gated(layer, to, to_row, x, x_row, rows, counters, sums, poll, every):  # type: ignore[no-untyped-def]
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
        if taken % every == 0:
            look_for_task(poll)
        item = coming
    _wait(counters, gate.count)


@njit(inline="never")
def _plain_head(s, x, x_row, counters, sums, poll, every):  # type: ignore[no-untyped-def]
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
        if taken % every == 0:
            look_for_task(poll)
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
def _layer(s, layer, then, turn, next_token, counters, normal, sums, poll, stage):  # type: ignore[no-untyped-def]
    """`then` is the product after this layer's last; stage: the number of its first."""
    step, wide = COUNTERS * 8, s.x_row
    if observe(counters) < layer.qkv.count:
        _normalise(normal, wide, s.x, wide, s.rows, s.size, layer.before)
    every = _every(s, poll, stage, layer.qkv.count)
    _product(layer.qkv, layer.o, s.qkv, s.qkv_row, normal, wide, s.rows, False, counters, sums, poll, every)
    _after(s, poll, stage)
    every = _every(s, poll, stage + 1, turn.batch * turn.spans)
    while attend(turn, next_token, every):
        look_for_task(poll)
    _wait(next_token, turn.batch * turn.spans)
    _after(s, poll, stage + 1)
    counters += 2 * step
    every = _every(s, poll, stage + 2, layer.o.count)
    _product(layer.o, layer.gate, s.x, wide, s.mixed, s.mixed_row, s.rows, True, counters, sums, poll, every)
    _after(s, poll, stage + 2)
    counters += step
    if observe(counters) < layer.gate.count:
        _normalise(normal, wide, s.x, wide, s.rows, s.size, layer.between)
    every = _every(s, poll, stage + 3, layer.gate.count)
    _gated(layer, s.inner, s.inner_row, normal, wide, s.rows, counters, sums, poll, every)
    _after(s, poll, stage + 3)
    counters += step
    every = _every(s, poll, stage + 4, layer.down.count)
    _product(layer.down, then, s.x, wide, s.inner, s.inner_row, s.rows, True, counters, sums, poll, every)
    _after(s, poll, stage + 4)


@njit(inline="never")
def _head(s, normal, counters, sums, poll):  # type: ignore[no-untyped-def]
    wide, stage = s.x_row, OPERATORS * s.depth
    for r in range(s.kept_rows):
        x = s.x + read_int(s.kept + r * 4) * wide
        norm_row(normal + r * wide, x, s.norm.weight, s.size, s.norm.eps, s.norm.offset)
    if s.plain != 0:
        every = _every(s, poll, stage, (s.vocab + PANEL - 1) // PANEL)
        _plain_head(s, normal, wide, counters, sums, poll, every)
    else:
        every = _every(s, poll, stage, s.head.count)
        to, row = s.logits, s.logits_row
        _product(s.head, s.head, to, row, normal, wide, s.kept_rows, False, counters, sums, poll, every)
    _after(s, poll, stage)


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
    poll = s.poll if s.poll != 0 and fetch_add(counters + 16, 1) == 0 else 0
    _begin(s, poll)
    _embed(s, counters)
    counters += COUNTERS * 8
    for i in range(s.depth):
        layer = layers[i]
        then = layers[i + 1].qkv if i + 1 < s.depth else s.head
        turn = s.attention + i * _ATTENTION_BYTES
        _layer(s, layer, then, turns[i], turn, counters, normal, sums, poll, i * OPERATORS)
        counters += STAGES * COUNTERS * 8
    _head(s, normal, counters, sums, poll)
    scratch[0] = 0  # numba frees an array after its last use, and addresses are none
