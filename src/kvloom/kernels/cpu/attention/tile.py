"""Attention of the few queries of a KV head over a tile of tokens: scores, the online softmax, and sums of V,
over rows of K and V in each format that the pool has for them.

Of each query `best` is the largest score so far, `norm` the sum of exp(score - best), and `sums` that of
exp(score - best) · v: FlashAttention's m, l and O before the division."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvloom.kernels.cpu.kv_rows import BFLOAT16, FLOAT32, SCALE, load_int8, read_int8
from kvloom.kernels.cpu.lanes.floats import (
    LANES,
    add,
    exponential,
    first,
    largest,
    load,
    load_bfloat16,
    maximum,
    multiply,
    multiply_add,
    ramp,
    read_bfloat16,
    splat,
    store,
    store_totals,
    subtract,
    tanh,
    total,
    variant,
)
from kvloom.kernels.cpu.memory import LINE, prefetch, read, write

TILE = 64  # tokens whose scores are held at once; a multiple of LANES
LOWEST = -3e38
_AHEAD = 8  # rows of k in float32; past its end comes v


def _scores(load_keys: Any, read_key: Any, item: int) -> Any:
    """Makes `score` for keys of `item` bytes a number, that these read; without their scales."""
    ahead = _AHEAD * 4 // item

    @variant(load_keys, read_key, item)
    def score(scores, q, q_head, k, row, count, group, dim):  # type: ignore[no-untyped-def]
        whole = dim // LANES * LANES
        for t in range(0, count - 3, 4):
            k0 = k + t * row
            k1, k2, k3 = k0 + row, k0 + 2 * row, k0 + 3 * row
            for i in range(0, 4 * row, LINE):
                prefetch(k0 + ahead * row + i)
            for g in range(group):
                x, at = q + g * q_head, scores + (g * TILE + t) * 4
                s0 = s1 = s2 = s3 = splat(0.0)
                for i in range(0, whole, LANES):
                    lanes = load(x + i * 4)
                    s0 = multiply_add(lanes, load_keys(k0 + i * item), s0)
                    s1 = multiply_add(lanes, load_keys(k1 + i * item), s1)
                    s2 = multiply_add(lanes, load_keys(k2 + i * item), s2)
                    s3 = multiply_add(lanes, load_keys(k3 + i * item), s3)
                store_totals(at, s0, s1, s2, s3)
                for i in range(whole, dim):
                    for j in range(4):
                        product = read(x + i * 4) * read_key(k0 + j * row + i * item)
                        write(at + j * 4, read(at + j * 4) + product)
        for t in range(count // 4 * 4, count):
            for g in range(group):
                x, y = q + g * q_head, k + t * row
                s0 = splat(0.0)
                for i in range(0, whole, LANES):
                    s0 = multiply_add(load(x + i * 4), load_keys(y + i * item), s0)
                s = total(s0)
                for i in range(whole, dim):
                    s += read(x + i * 4) * read_key(y + i * item)
                write(scores + (g * TILE + t) * 4, s)

    return score


_score_float32 = _scores(load, read, 4)
_score_bfloat16 = _scores(load_bfloat16, read_bfloat16, 2)
_score_int8 = _scores(load_int8, read_int8, 1)


@njit(inline="never")
def score(scores, q, q_head, k, count, group, dim):  # type: ignore[no-untyped-def]
    """Scores [group, TILE] of q [group, D] against k [count, D], all float32; four tokens share a load of
    q."""
    _score_float32(scores, q, q_head, k, dim * 4, count, group, dim)


@njit(inline="never")
def score_rows(scores, q, q_head, k, row, kind, count, group, dim):  # type: ignore[no-untyped-def]
    """Scores [group, TILE] of q [group, D], float32, against `count` rows of K in the format `kind`, `row`
    bytes each; without their scales."""
    if kind == FLOAT32:
        _score_float32(scores, q, q_head, k, row, count, group, dim)
    elif kind == BFLOAT16:
        _score_bfloat16(scores, q, q_head, k, row, count, group, dim)
    else:
        _score_int8(scores, q, q_head, k, row, count, group, dim)


@njit(inline="never")
def rescale(scores, scales, rows, row, count, group):  # type: ignore[no-untyped-def]
    """Multiplies scores or weights [group, TILE] by the scales of `count` rows. scales: scratch [TILE]."""
    for t in range(count):
        write(scales + t * 4, read(rows + (t + 1) * row - SCALE))
    for t in range(count, (count + LANES - 1) // LANES * LANES):
        write(scales + t * 4, 0.0)
    for i in range(0, count * 4, LANES * 4):
        factors = load(scales + i)
        for g in range(group):
            at = scores + g * TILE * 4 + i
            store(at, multiply(load(at), factors))


@njit(inline="always")
def _hide(scores, begin, end, value):  # type: ignore[no-untyped-def]
    for i in range(begin * 4, end * 4, 4):
        write(scores + i, value)


@njit(inline="never")
def weigh(scores, best, norm, sums, low, high, dim, scale, softcap, slope, ahead):  # type: ignore[no-untyped-def]
    """Turns one head's scores of the keys [low, high), at least one, into weights exp(s - best), and brings
    norm and sums [D] to the new best. Other keys of the vectors that these lie in get the weight 0. slope: of
    ALiBi's bias; ahead: the place of key 0 less the query's."""
    begin, end = low // LANES * LANES, (high + LANES - 1) // LANES * LANES
    for i in range(begin * 4, end * 4, LANES * 4):
        s = multiply(load(scores + i), splat(scale))
        if softcap > 0:
            s = multiply(tanh(multiply(s, splat(1 / softcap))), splat(softcap))
        if slope != 0:
            s = multiply_add(splat(slope), add(splat(np.float32(ahead + i // 4)), ramp()), s)
        store(scores + i, s)
    _hide(scores, begin, low, LOWEST)
    _hide(scores, high, end, LOWEST)
    top = load(scores + begin * 4)
    for i in range((begin + LANES) * 4, end * 4, LANES * 4):
        top = maximum(top, load(scores + i))
    old = read(best)
    new = max(old, largest(top))
    weights = splat(0.0)
    for i in range(begin * 4, end * 4, LANES * 4):
        p = exponential(subtract(load(scores + i), splat(new)))
        store(scores + i, p)
        weights = add(weights, p)
    _hide(scores, begin, low, 0.0)
    _hide(scores, high, end, 0.0)
    if new > old:
        shrink = exponential(splat(old - new))
        row, whole = dim * 4, dim // LANES * LANES * 4
        for i in range(0, whole, LANES * 4):
            store(sums + i, multiply(shrink, load(sums + i)))
        for i in range(whole, row, 4):
            write(sums + i, first(shrink) * read(sums + i))
        write(norm, read(norm) * first(shrink))
        write(best, new)
    write(norm, read(norm) + total(weights))


def _sums(load_values: Any, read_value: Any, item: int) -> Any:
    """Makes `accumulate` for values of `item` bytes a number, that these read; without their scales."""

    @variant(load_values, read_value, item)
    def accumulate(sums, weights, v, row, count, group, dim):  # type: ignore[no-untyped-def]
        whole = dim // LANES * LANES
        for t in range(0, count - 3, 4):
            v0 = v + t * row
            v1, v2, v3 = v0 + row, v0 + 2 * row, v0 + 3 * row
            for g in range(group):
                at, y = weights + (g * TILE + t) * 4, sums + g * dim * 4
                p0, p1 = splat(read(at)), splat(read(at + 4))
                p2, p3 = splat(read(at + 8)), splat(read(at + 12))
                for i in range(0, whole, LANES):
                    s = multiply_add(p0, load_values(v0 + i * item), load(y + i * 4))
                    s = multiply_add(p1, load_values(v1 + i * item), s)
                    s = multiply_add(p2, load_values(v2 + i * item), s)
                    store(y + i * 4, multiply_add(p3, load_values(v3 + i * item), s))
                for i in range(whole, dim):
                    for j in range(4):
                        product = read(at + j * 4) * read_value(v0 + j * row + i * item)
                        write(y + i * 4, read(y + i * 4) + product)
        for t in range(count // 4 * 4, count):
            for g in range(group):
                p, x, y = read(weights + (g * TILE + t) * 4), v + t * row, sums + g * dim * 4
                for i in range(0, whole, LANES):
                    store(y + i * 4, multiply_add(splat(p), load_values(x + i * item), load(y + i * 4)))
                for i in range(whole, dim):
                    write(y + i * 4, read(y + i * 4) + p * read_value(x + i * item))

    return accumulate


_accumulate_float32 = _sums(load, read, 4)
_accumulate_bfloat16 = _sums(load_bfloat16, read_bfloat16, 2)
_accumulate_int8 = _sums(load_int8, read_int8, 1)


@njit(inline="never")
def accumulate_rows(sums, weights, v, row, kind, count, group, dim):  # type: ignore[no-untyped-def]
    """Adds weights [group, TILE] times `count` rows of V in the format `kind`, `row` bytes each, without
    their scales, to sums [group, D]; four tokens share a load of a sum."""
    if kind == FLOAT32:
        _accumulate_float32(sums, weights, v, row, count, group, dim)
    elif kind == BFLOAT16:
        _accumulate_bfloat16(sums, weights, v, row, count, group, dim)
    else:
        _accumulate_int8(sums, weights, v, row, count, group, dim)
