"""A whole decode step of few rows in one parallel region, on a CPU.

Few rows are bound by reading weights, and by the way between the products: so the team is woken once, and
walks through the layers by itself. A stage's work items are handed out by a counter, and the stage is over
when as many are done: a thread that comes late finds the work done by the others, and holds nobody up.

Where another unit's tasks may come, the thread that is first to enter looks for them: after each stage, and
so often within it as the plan of its parts says. No sum changes by that, and the others go on meanwhile.
"""

import ctypes

import numpy as np
from numba import carray, njit

from kvloom.kernels.cpu_attention import ALL, AttentionArguments, attend
from kvloom.kernels.cpu_poll import busy, look_for_task, nanoseconds
from kvloom.kernels.cpu_stages import gated, normalise, plain_head, product, wait
from kvloom.kernels.panels import PANEL
from kvloom.kernels.parallel import kernel
from kvloom.kernels.rows import copy_row, norm_row
from kvloom.kernels.vector import LANES, fetch_add, observe, pointer_at, read_int

COUNTERS = 16  # 64-bit words a stage: `next` and `done`, alone in their cache lines
STAGES = OPERATORS = 5  # a layer; before the first the embedding, after the last the head
_LINE = 64


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


@njit(inline="never")
def _embed(s, counters):  # type: ignore[no-untyped-def]
    row = fetch_add(counters, 1)
    while row < s.rows:
        token = read_int(s.tokens + row * 4)
        copy_row(s.x + row * s.x_row, s.embedding + token * s.size * 4, s.size * 4)
        fetch_add(counters + 8, 1)
        row = fetch_add(counters, 1)
    wait(counters, s.rows)


@njit(inline="never")
def _layer(s, layer, then, turn, next_token, counters, normal, sums, poll, stage):  # type: ignore[no-untyped-def]
    """`then` is the product after this layer's last; stage: the number of its first."""
    step, wide = COUNTERS * 8, s.x_row
    if observe(counters) < layer.qkv.count:
        normalise(normal, wide, s.x, wide, s.rows, s.size, layer.before)
    every = _every(s, poll, stage, layer.qkv.count)
    product(layer.qkv, layer.o, s.qkv, s.qkv_row, normal, wide, s.rows, False, counters, sums, poll, every)
    _after(s, poll, stage)
    every = _every(s, poll, stage + 1, turn.batch * turn.spans)
    while attend(turn, next_token, every):
        look_for_task(poll)
    wait(next_token, turn.batch * turn.spans)
    _after(s, poll, stage + 1)
    counters += 2 * step
    every = _every(s, poll, stage + 2, layer.o.count)
    product(layer.o, layer.gate, s.x, wide, s.mixed, s.mixed_row, s.rows, True, counters, sums, poll, every)
    _after(s, poll, stage + 2)
    counters += step
    if observe(counters) < layer.gate.count:
        normalise(normal, wide, s.x, wide, s.rows, s.size, layer.between)
    every = _every(s, poll, stage + 3, layer.gate.count)
    gated(layer, s.inner, s.inner_row, normal, wide, s.rows, counters, sums, poll, every)
    _after(s, poll, stage + 3)
    counters += step
    every = _every(s, poll, stage + 4, layer.down.count)
    product(layer.down, then, s.x, wide, s.inner, s.inner_row, s.rows, True, counters, sums, poll, every)
    _after(s, poll, stage + 4)


@njit(inline="never")
def _head(s, normal, counters, sums, poll):  # type: ignore[no-untyped-def]
    wide, stage = s.x_row, OPERATORS * s.depth
    for r in range(s.kept_rows):
        x = s.x + read_int(s.kept + r * 4) * wide
        norm_row(normal + r * wide, x, s.norm.weight, s.size, s.norm.eps, s.norm.offset)
    if s.plain != 0:
        every = _every(s, poll, stage, (s.vocab + PANEL - 1) // PANEL)
        plain_head(s, normal, wide, counters, sums, poll, every)
    else:
        every = _every(s, poll, stage, s.head.count)
        to, row = s.logits, s.logits_row
        product(s.head, s.head, to, row, normal, wide, s.kept_rows, False, counters, sums, poll, every)
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
