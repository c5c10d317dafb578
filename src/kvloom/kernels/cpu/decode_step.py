"""A whole decode step of a small batch in one parallel region, on a CPU: what GPUs call a megakernel.

Few rows are bound by reading weights, and by the way between the products: so the team is woken once, and
walks through the layers by itself. A stage's work items are handed out by a counter, and the stage is over
when as many are done: a thread that comes late finds the work done by the others, and holds nobody up.

If another unit's tasks may come, the thread that is first to enter looks for them: after each stage, and so
often within it as the plan of its parts says. No sum changes by that, and the others go on meanwhile.

If some rows are offloaded, another unit attends for them while this one does for its own.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numba import carray, njit

from kvloom.kernels.cpu.attention.decode import (
    ALL,
    AttentionArguments,
    advance,
    begin,
    items_of,
    room_of,
    rotate_heads,
    tokens_of,
)
from kvloom.kernels.cpu.elementwise import copy_row, norm_row
from kvloom.kernels.cpu.half import FLOAT32, widen_output, widen_row
from kvloom.kernels.cpu.lanes.floats import LANES
from kvloom.kernels.cpu.low_rank import DOWN, LOW_STAGES, QKV, O, low_products
from kvloom.kernels.cpu.memory import (
    acquire,
    aligned,
    exchange,
    fetch_add,
    observe,
    pointer_at,
    read_int,
    rest,
    wake,
    write,
)
from kvloom.kernels.cpu.offload_serve import MASK, LookArguments, finish, look, nanoseconds, start
from kvloom.kernels.cpu.panels import PANEL
from kvloom.kernels.cpu.parallel import kernel
from kvloom.kernels.cpu.products import QUANTIZED, gated, normalise, plain_head, product, wait
from kvloom.kernels.cpu.quantized.lookup import unpack_output
from kvloom.kernels.mailbox import NOTE

NOWHERE = -1


class AskArguments(ctypes.Structure):
    """The borrower's part in one loan. Addresses: the mailbox' words posted, finished, asleep and over;
    notes, qkv and out, whose slots are so many bytes apart, and whose rows have qkv_row and out_row bytes;
    meanwhile [layers], to which the kernel writes what the rows that are here took, in nanoseconds; clock, 16
    bytes. futex: the system call's number. spins: looks for an output, at most. count: the number of the last
    task that was posted.

    The rest is of one step. iteration; rows that are offloaded, `first` the first of them; lost: not 0 if
    nobody is asked, and their attention is zeros; paused: the layer whose output the host is to wait for, or
    NOWHERE; refused: not 0 if it is to post the task, too; resume: the layer after whose attention to go on,
    or NOWHERE; went: when the last task was posted, by the monotonic clock.
    """

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("posted", "finished", "asleep", "over", "notes", "note_bytes")),
        *((name, ctypes.c_int64) for name in ("slots", "qkv", "qkv_slot", "qkv_row")),
        *((name, ctypes.c_int64) for name in ("out", "out_slot", "out_row")),
        *((name, ctypes.c_int64) for name in ("meanwhile", "clock", "futex", "spins", "count")),
        *((name, ctypes.c_int64) for name in ("iteration", "rows", "first", "lost")),
        *((name, ctypes.c_int64) for name in ("paused", "refused", "resume", "went")),
    ]


_ASK = np.dtype(AskArguments)


@njit(inline="never")
def resumed_at(address):  # type: ignore[no-untyped-def]
    """Returns the layer to go on after; NOWHERE for the beginning. address: of AskArguments, or 0."""
    return NOWHERE if address == 0 else carray(pointer_at(address), 1, _ASK)[0].resume


@njit(inline="never")
def _send(a, attention, layer):  # type: ignore[no-untyped-def]
    """Posts the task, all of whose rows lie in the slot."""
    if acquire(a.finished) != a.count or acquire(a.over) != 0:
        a.refused = 1
        return
    note = carray(pointer_at(a.notes + (a.count & (a.slots - 1)) * a.note_bytes), 1, NOTE)[0]
    note.iteration, note.layer, note.rows, note.window = a.iteration, layer, a.rows, attention.window
    note.scale, note.softcap = attention.scale, attention.softcap
    a.went = nanoseconds(a.clock)
    note.posted = a.went
    a.count = (a.count + 1) & MASK
    exchange(a.posted, a.count)  # a full barrier: a lender that is awake now looks once more before it sleeps
    if acquire(a.asleep) != 0:
        wake(a.futex, a.posted)


@njit(inline="never")
def post(address, attention, layer, counters):  # type: ignore[no-untyped-def]
    """Brings the offloaded rows into the mailbox; the thread that brings the last one posts the task, and
    counts that, too."""
    a = carray(pointer_at(address), 1, _ASK)[0]
    if a.lost != 0:
        return
    slot = a.qkv + (a.count & (a.slots - 1)) * a.qkv_slot
    row = fetch_add(counters, 1)
    while row < a.rows:
        rotate_heads(attention, a.first + row, 0, attention.kv_heads)
        copy_row(slot + row * a.qkv_row, attention.q + (a.first + row) * attention.q_row, a.qkv_row)
        if fetch_add(counters + 8, 1) == a.rows - 1:
            _send(a, attention, layer)
            fetch_add(counters + 8, 1)
        row = fetch_add(counters, 1)


@njit(inline="never")
def _arrived(a):  # type: ignore[no-untyped-def]
    """Waits for the output. Returns False if the host is to do so."""
    turns = 0
    done = acquire(a.finished)
    while done == (a.count - 1) & MASK and turns < a.spins:
        turns += 1
        if rest(turns) and acquire(a.over) != 0:
            return False
        done = acquire(a.finished)
    return done == a.count


@njit(inline="never")
def _take(a, attention, layer, posting):  # type: ignore[no-untyped-def]
    """Copies the output of the offloaded rows, or says that the host has to wait for it (`paused`)."""
    to = attention.out + a.first * attention.out_row
    if a.lost != 0:
        for row in range(a.rows):
            for i in range(0, a.out_row, 4):
                write(to + row * attention.out_row + i, 0.0)
        return
    wait(posting, a.rows + 1)
    if a.refused != 0:
        a.paused = layer
        return
    now = nanoseconds(a.clock)
    carray(pointer_at(a.meanwhile), layer + 1, np.int64)[layer] = now - a.went
    if not _arrived(a):
        a.paused = layer
        return
    slot = a.out + ((a.count - 1) & (a.slots - 1)) * a.out_slot
    for row in range(a.rows):
        copy_row(to + row * attention.out_row, slot + row * a.out_row, a.out_row)


@njit(inline="never")
def collect(address, attention, layer, posting, counters):  # type: ignore[no-untyped-def]
    """Takes the output by one thread, for which the others wait. Returns False if the host has to, and the
    step ends here. posting: the counters that the task was posted by."""
    a = carray(pointer_at(address), 1, _ASK)[0]
    if fetch_add(counters, 1) == 0:
        _take(a, attention, layer, posting)
        fetch_add(counters + 8, 1)
    wait(counters, 1)
    return a.paused == NOWHERE


COUNTERS = 16  # 64-bit words a stage: `next` and `done`, alone in their cache lines
OPERATORS = 5  # a layer; before the first the embedding, after the last the head
_LOW = OPERATORS + 1  # the first of the adapters' stages; two before are of rows that are away, in place of
# attention, which has counters of its own
STAGES = _LOW + LOW_STAGES
ARRIVALS = 16  # byte of the first stage's counters: threads that have come, if one of them is to look


class LinearArguments(ctypes.Structure):
    """A product of `count` panels of 64 columns over `depth` inputs, `stride` bytes each; bias has 64 · count
    values. form: the number format of the panels, as in `half.FORMATS`; with QUANTIZED panels are
    ItemArguments. rounds: the address of what is not 0 if inputs are rounded to bfloat16 first, and lie at
    the byte `at` of a row that is ready; 0 if they never are. parts: `part_count` ReadyArguments of the
    stage."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("form", "panels", "count", "stride", "depth", "bias")),
        *((name, ctypes.c_int64) for name in ("rounds", "at", "parts", "part_count")),
    ]


class NormArguments(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_int64), ("eps", ctypes.c_double), ("offset", ctypes.c_double)]


class LayerArguments(ctypes.Structure):
    _fields_ = [
        *((name, NormArguments) for name in ("input_norm", "mlp_norm")),
        *((name, LinearArguments) for name in ("qkv", "o", "gate", "up", "down")),
        ("activation", ctypes.c_int64),
    ]


class StepArguments(ctypes.Structure):
    """The addresses and sizes of a step. Rows of x, qkv, attended (attention's output), inner (the MLP's) and
    logits are their `_row` bytes apart, and all but attended have room for whole panels. plain: the head's
    weight [V, K] if it is not in panels, else 0. ready_row: bytes of what products make of a row of their
    inputs before they multiply, at most. embedding: 0 if the tokens' rows are in x already.
    embedding_form: the embedding's number format, as in `half.FORMATS`, or QUANTIZED: `embedding` is the
    address of QuantizedArguments then; embedding_panel: the bytes of a panel if the embedding is in panels,
    as a tied head of 16 bits has them, else 0.

    adapted: the LowRankArguments, or 0 if no row has an adapter; ask: the AskArguments, or 0 if no row is
    offloaded; poll: the LookArguments, or 0 if no tasks come. For
    each stage, the last the head: parts [OPERATORS · depth + 1], and ends, as long, the pieces that there are
    when it is over.
    """

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("counters", "layers", "attention", "depth", "rows", "size")),
        *((name, ctypes.c_int64) for name in ("tokens", "embedding", "embedding_form", "embedding_panel")),
        *((name, ctypes.c_int64) for name in ("x", "x_row", "qkv", "qkv_row")),
        *((name, ctypes.c_int64) for name in ("attended", "attended_row", "inner", "inner_row")),
        ("ready_row", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("kept", "kept_rows", "logits", "logits_row", "plain", "vocab")),
        *((name, ctypes.c_int64) for name in ("adapted", "ask", "poll", "parts", "ends", "threads")),
        ("norm", NormArguments),
        ("head", LinearArguments),
    ]


_LAYER = np.dtype(LayerArguments)
_ATTENTION = np.dtype(AttentionArguments)
_LOOK = np.dtype(LookArguments)
_ATTENTION_BYTES = ctypes.sizeof(AttentionArguments)


@njit(inline="never")
def _parts(s, poll, stage):  # type: ignore[no-untyped-def]
    """Returns the parts of a stage after which the thread that looks does so; the others never do. Parts are
    of all items: if there are more threads it has some of them alone."""
    if poll == 0:
        return 0
    return carray(pointer_at(s.parts), OPERATORS * s.depth + 1, np.int64)[stage] * s.threads


@njit(inline="never")
def _after(s, poll, stage):  # type: ignore[no-untyped-def]
    """Ends a stage."""
    if poll != 0:
        look(poll)
        ends = carray(pointer_at(s.ends), OPERATORS * s.depth + 1, np.int64)
        ends[stage] = carray(pointer_at(poll), 1, _LOOK)[0].count


@njit(inline="never")
def _embed(s, counters):  # type: ignore[no-untyped-def]
    """Looks the tokens' rows up in the embedding, in float32."""
    if s.embedding == 0:
        return
    row = fetch_add(counters, 1)
    while row < s.rows:
        token = read_int(s.tokens + row * 4)
        to, form = s.x + row * s.x_row, s.embedding_form
        if form == QUANTIZED:
            unpack_output(s.embedding, token, to, s.size)
        elif s.embedding_panel != 0:
            widen_output(to, s.embedding, s.embedding_panel, token, s.size, form)
        elif form == FLOAT32:
            copy_row(to, s.embedding + token * s.size * 4, s.size * 4)
        else:
            widen_row(to, s.embedding + token * s.size * 2, s.size, form)
        fetch_add(counters + 8, 1)
        row = fetch_add(counters, 1)
    wait(counters, s.rows)


@njit(inline="never")
def _attend(attention, counters, poll, parts):  # type: ignore[no-untyped-def]
    """Runs the stage of attention. counters: the address of its arguments, which begin with them. Parts are
    of so many tokens, wherever in a sequence they end."""
    scratch = np.empty(room_of(attention) + LANES, np.float32)
    place = aligned(scratch)
    tokens, part = tokens_of(attention), 1
    begin(place)
    while advance(attention, counters, place, ALL if part >= parts else max(part, tokens * part // parts)):
        look(poll)
        part += 1
    wait(counters, items_of(attention))
    scratch[0] = 0


@njit(inline="never")
def _attention_half(s, layer, attention, address, counters, normal, scratch, poll, stage):  # type: ignore[no-untyped-def]
    """Runs a layer up to attention's output; returns False if the host has to wait for a part of that.
    address: of the arguments `attention`. stage: the number of the layer's first."""
    step, x_row = COUNTERS * 8, s.x_row
    number, to, x = stage // OPERATORS, (s.qkv, s.qkv_row), (normal, x_row)
    if s.adapted != 0 or observe(counters) < layer.qkv.count:
        normalise(normal, x_row, s.x, x_row, s.rows, s.size, layer.input_norm)
    if s.adapted != 0:
        low_products(s.adapted, number, 0, x, layer.qkv.depth, counters + _LOW * step)
    parts, low = _parts(s, poll, stage), (s.adapted, number, QKV)
    product(layer.qkv, layer.o, to, x, s.rows, False, counters, scratch, poll, parts, low)
    _after(s, poll, stage)
    if s.ask != 0:
        post(s.ask, attention, number, counters + step)
    _attend(attention, address, poll, _parts(s, poll, stage + 1))
    _after(s, poll, stage + 1)
    return s.ask == 0 or collect(s.ask, attention, number, counters + step, counters + 2 * step)


@njit(inline="never")
def _mlp_half(s, layer, then, counters, normal, scratch, poll, stage):  # type: ignore[no-untyped-def]
    """Runs the rest of a layer: the output projection and the MLP. `then` is the product after its last."""
    step, x_row, adapted, number = COUNTERS * 8, s.x_row, s.adapted, stage // OPERATORS
    lows = counters + (_LOW + 1) * step
    counters += 3 * step
    parts = _parts(s, poll, stage + 2)
    to, attended, inner = (s.x, x_row), (s.attended, s.attended_row), (s.inner, s.inner_row)
    if adapted != 0:
        low_products(adapted, number, 1, attended, layer.o.depth, lows)
    low = (adapted, number, O)
    product(layer.o, layer.gate, to, attended, s.rows, True, counters, scratch, poll, parts, low)
    _after(s, poll, stage + 2)
    counters += step
    if adapted != 0 or observe(counters) < layer.gate.count:
        normalise(normal, x_row, s.x, x_row, s.rows, s.size, layer.mlp_norm)
    if adapted != 0:
        low_products(adapted, number, 2, (normal, x_row), layer.gate.depth, lows + step)
    parts = _parts(s, poll, stage + 3)
    gated(layer, inner, (normal, x_row), s.rows, counters, scratch, poll, parts, (adapted, number))
    _after(s, poll, stage + 3)
    counters += step
    parts = _parts(s, poll, stage + 4)
    if adapted != 0:
        low_products(adapted, number, 3, inner, layer.down.depth, lows + 2 * step)
    low = (adapted, number, DOWN)
    product(layer.down, then, to, inner, s.rows, True, counters, scratch, poll, parts, low)
    _after(s, poll, stage + 4)


@njit(inline="never")
def _head(s, normal, counters, scratch, poll):  # type: ignore[no-untyped-def]
    """Normalises the kept rows and computes their logits."""
    x_row, stage = s.x_row, OPERATORS * s.depth
    for r in range(s.kept_rows):
        x = s.x + read_int(s.kept + r * 4) * x_row
        norm_row(normal + r * x_row, x, s.norm.weight, s.size, s.norm.eps, s.norm.offset)
    parts = _parts(s, poll, stage)
    if s.plain != 0:
        plain_head(s, normal, x_row, counters, scratch[0], poll, parts)
    else:
        to, x = (s.logits, s.logits_row), (normal, x_row)
        product(s.head, s.head, to, x, s.kept_rows, False, counters, scratch, poll, parts, (0, 0, 0))
    _after(s, poll, stage)


@njit(inline="never")
def _layers(s, normal, scratch, poll):  # type: ignore[no-untyped-def]
    """Runs the layers. Returns False if the host has to wait for another unit first, and then begin anew with
    `resume`."""
    layers = carray(pointer_at(s.layers), s.depth, _LAYER)
    calls = carray(pointer_at(s.attention), s.depth, _ATTENTION)
    resume = resumed_at(s.ask)
    for i in range(max(0, resume), s.depth):
        counters = s.counters + (1 + i * STAGES) * COUNTERS * 8
        address, stage = s.attention + i * _ATTENTION_BYTES, i * OPERATORS
        if i != resume and not _attention_half(
            s, layers[i], calls[i], address, counters, normal, scratch, poll, stage
        ):
            return False
        then = layers[i + 1].qkv if i + 1 < s.depth else s.head
        _mlp_half(s, layers[i], then, counters, normal, scratch, poll, stage)
    return True


@kernel(StepArguments)
def step(pointer):  # type: ignore[no-untyped-def]
    """Runs a decode step, from the tokens to the logits."""
    s = carray(pointer, 1)[0]
    most = max(s.rows, s.kept_rows)
    room = np.empty(most * (s.x_row + s.ready_row) // 4 + 2 * (most + 3) * PANEL + LANES, np.float32)
    normal = aligned(room)
    ready = normal + most * s.x_row
    scratch = ready + most * s.ready_row, ready, s.ready_row
    poll = s.poll if s.poll != 0 and fetch_add(s.counters + ARRIVALS, 1) == 0 else 0
    if poll != 0:
        start(poll)
    _embed(s, s.counters)
    if _layers(s, normal, scratch, poll):
        _head(s, normal, s.counters + (1 + s.depth * STAGES) * COUNTERS * 8, scratch, poll)
    if poll != 0:
        finish(poll)
    room[0] = 0  # see `aligned`
