"""A whole decode step of few rows in one parallel region, on a CPU.

Few rows are bound by reading weights, and by the way between the products: so the team is woken once, and
walks through the layers by itself. A stage's work items are handed out by a counter, and the stage is over
when as many are done: a thread that comes late finds the work done by the others, and holds nobody up.

Where another unit's tasks may come, the thread that is first to enter looks for them: after each stage, and
so often within it as the plan of its parts says. No sum changes by that, and the others go on meanwhile.

Where some rows are away, another unit attends for them while this one does for its own (`cpu_ask.py`).
"""

import ctypes

import numpy as np
from numba import carray, njit

from kvloom.kernels.cpu_ask import collect, post, resumed_at
from kvloom.kernels.cpu_attention import ALL, AttentionArguments, advance, begin, room_of, tokens_of
from kvloom.kernels.cpu_look import LookArguments, finish, look, start
from kvloom.kernels.cpu_stages import gated, normalise, plain_head, product, wait
from kvloom.kernels.memory import fetch_add, observe, pointer_at, read_int
from kvloom.kernels.panels import PANEL
from kvloom.kernels.parallel import kernel
from kvloom.kernels.rows import copy_row, norm_row
from kvloom.kernels.vector import LANES

COUNTERS = 16  # 64-bit words a stage: `next` and `done`, alone in their cache lines
OPERATORS = 5  # a layer; before the first the embedding, after the last the head
STAGES = OPERATORS + 1  # two of rows that are away, in place of attention, which has counters of its own
FIRST = 16  # byte of the first counters: threads that have come, where one of them is to look
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

    ask: the AskArguments, or 0 where no row is away; poll: the LookArguments, or 0 where no tasks come. Of
    each stage, the last the head: parts [OPERATORS · depth + 1], and ends, as long, the pieces that there are
    when it is over."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("counters", "layers", "attention", "depth", "rows", "size")),
        *((name, ctypes.c_int64) for name in ("tokens", "embedding", "x", "x_row", "qkv", "qkv_row")),
        *((name, ctypes.c_int64) for name in ("mixed", "mixed_row", "inner", "inner_row")),
        *((name, ctypes.c_int64) for name in ("kept", "kept_rows", "logits", "logits_row", "plain", "vocab")),
        *((name, ctypes.c_int64) for name in ("ask", "poll", "parts", "ends", "threads")),
        ("norm", NormArguments),
        ("head", LinearArguments),
    ]


_LAYER = np.dtype(LayerArguments)
_ATTENTION = np.dtype(AttentionArguments)
_LOOK = np.dtype(LookArguments)
_ATTENTION_BYTES = ctypes.sizeof(AttentionArguments)


@njit(inline="never")
def _parts(s, poll, stage):  # type: ignore[no-untyped-def]
    """Parts of a stage after which the thread that looks does so; the others never do. Of all items: where
    there are more threads it has some of them alone."""
    if poll == 0:
        return 0
    return carray(pointer_at(s.parts), OPERATORS * s.depth + 1, np.int64)[stage] * s.threads


@njit(inline="never")
def _after(s, poll, stage):  # type: ignore[no-untyped-def]
    """A stage is over."""
    if poll != 0:
        look(poll)
        ends = carray(pointer_at(s.ends), OPERATORS * s.depth + 1, np.int64)
        ends[stage] = carray(pointer_at(poll), 1, _LOOK)[0].count


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
def _attend(turn, counters, poll, parts):  # type: ignore[no-untyped-def]
    """A stage. Parts are of so many tokens, wherever in a sequence they end."""
    scratch = np.empty(room_of(turn) + LANES, np.float32)
    place = (scratch.ctypes.data + _LINE - 1) // _LINE * _LINE
    tokens, part = tokens_of(turn), 1
    begin(place)
    while advance(turn, counters, place, ALL if part >= parts else max(part, tokens * part // parts)):
        look(poll)
        part += 1
    wait(counters, turn.batch * turn.spans)
    scratch[0] = 0


@njit(inline="never")
def _mix(s, layer, turn, next_token, counters, normal, sums, poll, stage):  # type: ignore[no-untyped-def]
    """Up to attention's output; False where the host has to wait for a part of that. stage: the number of the
    layer's first."""
    step, wide = COUNTERS * 8, s.x_row
    if observe(counters) < layer.qkv.count:
        normalise(normal, wide, s.x, wide, s.rows, s.size, layer.before)
    parts = _parts(s, poll, stage)
    product(layer.qkv, layer.o, s.qkv, s.qkv_row, normal, wide, s.rows, False, counters, sums, poll, parts)
    _after(s, poll, stage)
    number = stage // OPERATORS
    if s.ask != 0:
        post(s.ask, turn, number, counters + step)
    _attend(turn, next_token, poll, _parts(s, poll, stage + 1))
    _after(s, poll, stage + 1)
    return s.ask == 0 or collect(s.ask, turn, number, counters + step, counters + 2 * step)


@njit(inline="never")
def _finish(s, layer, then, counters, normal, sums, poll, stage):  # type: ignore[no-untyped-def]
    """After it. `then` is the product after this layer's last."""
    step, wide = COUNTERS * 8, s.x_row
    counters += 3 * step
    parts = _parts(s, poll, stage + 2)
    product(layer.o, layer.gate, s.x, wide, s.mixed, s.mixed_row, s.rows, True, counters, sums, poll, parts)
    _after(s, poll, stage + 2)
    counters += step
    if observe(counters) < layer.gate.count:
        normalise(normal, wide, s.x, wide, s.rows, s.size, layer.between)
    parts = _parts(s, poll, stage + 3)
    gated(layer, s.inner, s.inner_row, normal, wide, s.rows, counters, sums, poll, parts)
    _after(s, poll, stage + 3)
    counters += step
    parts = _parts(s, poll, stage + 4)
    product(layer.down, then, s.x, wide, s.inner, s.inner_row, s.rows, True, counters, sums, poll, parts)
    _after(s, poll, stage + 4)


@njit(inline="never")
def _head(s, normal, counters, sums, poll):  # type: ignore[no-untyped-def]
    wide, stage = s.x_row, OPERATORS * s.depth
    for r in range(s.kept_rows):
        x = s.x + read_int(s.kept + r * 4) * wide
        norm_row(normal + r * wide, x, s.norm.weight, s.size, s.norm.eps, s.norm.offset)
    parts = _parts(s, poll, stage)
    if s.plain != 0:
        plain_head(s, normal, wide, counters, sums, poll, parts)
    else:
        to, row = s.logits, s.logits_row
        product(s.head, s.head, to, row, normal, wide, s.kept_rows, False, counters, sums, poll, parts)
    _after(s, poll, stage)


@njit(inline="never")
def _layers(s, normal, sums, poll):  # type: ignore[no-untyped-def]
    """False where the host has to wait for another unit first, and then begin anew with `resume`."""
    layers = carray(pointer_at(s.layers), s.depth, _LAYER)
    turns = carray(pointer_at(s.attention), s.depth, _ATTENTION)
    resume = resumed_at(s.ask)
    for i in range(max(0, resume), s.depth):
        counters = s.counters + (1 + i * STAGES) * COUNTERS * 8
        turn, stage = s.attention + i * _ATTENTION_BYTES, i * OPERATORS
        if i != resume and not _mix(s, layers[i], turns[i], turn, counters, normal, sums, poll, stage):
            return False
        then = layers[i + 1].qkv if i + 1 < s.depth else s.head
        _finish(s, layers[i], then, counters, normal, sums, poll, stage)
    return True


@kernel(StepArguments)
def step(pointer):  # type: ignore[no-untyped-def]
    s = carray(pointer, 1)[0]
    most = max(s.rows, s.kept_rows)
    scratch = np.empty(most * s.x_row // 4 + 2 * (most + 3) * PANEL + LANES, np.float32)
    normal = (scratch.ctypes.data + _LINE - 1) // _LINE * _LINE
    sums = normal + most * s.x_row
    poll = s.poll if s.poll != 0 and fetch_add(s.counters + FIRST, 1) == 0 else 0
    if poll != 0:
        start(poll)
    _embed(s, s.counters)
    if _layers(s, normal, sums, poll):
        _head(s, normal, s.counters + (1 + s.depth * STAGES) * COUNTERS * 8, sums, poll)
    if poll != 0:
        finish(poll)
    scratch[0] = 0  # numba frees an array after its last use, and addresses are none
