"""Decode attention of one KV head over a tile of tokens: scores, their softmax so far, the sum over V."""

from numba import njit

from kvloom.kernels.memory import prefetch, read, write
from kvloom.kernels.vector import (
    LANES,
    add,
    exponential,
    first,
    largest,
    load,
    maximum,
    multiply,
    multiply_add,
    splat,
    store,
    store_totals,
    subtract,
    tanh,
    total,
)

TILE = 64  # tokens whose scores are held at once; a multiple of LANES
LOWEST = -3e38
_LINE = 64
_AHEAD = 8  # rows of k; past its end comes v


@njit(inline="never")
def score(scores, q, q_head, k, count, group, dim):  # type: ignore[no-untyped-def]
    """Scores [group, TILE] of q [group, D] against k [count, D]; four tokens share a load of q."""
    row, whole = dim * 4, dim // LANES * LANES * 4
    for t in range(0, count - 3, 4):
        k0 = k + t * row
        k1, k2, k3 = k0 + row, k0 + 2 * row, k0 + 3 * row
        for i in range(0, 4 * row, _LINE):
            prefetch(k0 + _AHEAD * row + i)
        for g in range(group):
            x, at = q + g * q_head, scores + (g * TILE + t) * 4
            s0 = s1 = s2 = s3 = splat(0.0)
            for i in range(0, whole, LANES * 4):
                lanes = load(x + i)
                s0 = multiply_add(lanes, load(k0 + i), s0)
                s1 = multiply_add(lanes, load(k1 + i), s1)
                s2 = multiply_add(lanes, load(k2 + i), s2)
                s3 = multiply_add(lanes, load(k3 + i), s3)
            store_totals(at, s0, s1, s2, s3)
            for i in range(whole, row, 4):
                for j in range(4):
                    write(at + j * 4, read(at + j * 4) + read(x + i) * read(k0 + j * row + i))
    for t in range(count // 4 * 4, count):
        for g in range(group):
            x, y = q + g * q_head, k + t * row
            s0 = splat(0.0)
            for i in range(0, whole, LANES * 4):
                s0 = multiply_add(load(x + i), load(y + i), s0)
            s = total(s0)
            for i in range(whole, row, 4):
                s += read(x + i) * read(y + i)
            write(scores + (g * TILE + t) * 4, s)


@njit(inline="never")
def weigh(scores, best, norm, sums, count, dim, scale, softcap):  # type: ignore[no-untyped-def]
    """Turn one head's scores into weights exp(s - best), and bring norm and sums [D] to the new best."""
    padded = (count + LANES - 1) // LANES * LANES * 4
    for i in range(0, padded, LANES * 4):
        s = multiply(load(scores + i), splat(scale))
        if softcap > 0:
            s = multiply(tanh(multiply(s, splat(1 / softcap))), splat(softcap))
        store(scores + i, s)
    for i in range(count * 4, padded, 4):
        write(scores + i, LOWEST)
    top = load(scores)
    for i in range(LANES * 4, padded, LANES * 4):
        top = maximum(top, load(scores + i))
    old = read(best)
    new = max(old, largest(top))
    weights = splat(0.0)
    for i in range(0, padded, LANES * 4):
        p = exponential(subtract(load(scores + i), splat(new)))
        store(scores + i, p)
        weights = add(weights, p)
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


@njit(inline="never")
def accumulate(sums, weights, v, count, group, dim):  # type: ignore[no-untyped-def]
    """Add weights [group, TILE] times v [count, D] to sums [group, D]; four tokens share a load of a sum."""
    row, whole = dim * 4, dim // LANES * LANES * 4
    for t in range(0, count - 3, 4):
        v0 = v + t * row
        v1, v2, v3 = v0 + row, v0 + 2 * row, v0 + 3 * row
        for g in range(group):
            at, y = weights + (g * TILE + t) * 4, sums + g * row
            p0, p1, p2, p3 = splat(read(at)), splat(read(at + 4)), splat(read(at + 8)), splat(read(at + 12))
            for i in range(0, whole, LANES * 4):
                s = multiply_add(p0, load(v0 + i), load(y + i))
                s = multiply_add(p1, load(v1 + i), s)
                s = multiply_add(p2, load(v2 + i), s)
                store(y + i, multiply_add(p3, load(v3 + i), s))
            for i in range(whole, row, 4):
                for j in range(4):
                    write(y + i, read(y + i) + read(at + j * 4) * read(v0 + j * row + i))
    for t in range(count // 4 * 4, count):
        for g in range(group):
            p, x, y = read(weights + (g * TILE + t) * 4), v + t * row, sums + g * row
            for i in range(0, whole, LANES * 4):
                store(y + i, multiply_add(splat(p), load(x + i), load(y + i)))
            for i in range(whole, row, 4):
                write(y + i, read(y + i) + p * read(x + i))
