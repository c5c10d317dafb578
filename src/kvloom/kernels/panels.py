"""Products of a few rows with a weight, by address: over panels of 64 columns, or over plain rows.

A panel holds its columns for one input after the other, [K, 64]: what oneDNN keeps a packed weight in, found
by `model/panels.py`. A product of few rows reads each weight once and is bound by memory, so each loop
fetches ahead, and near its end from where the caller reads next.
"""

from numba import njit

from kvloom.kernels.memory import prefetch, read
from kvloom.kernels.vector import LANES, load, multiply_add, splat, store

PANEL = 64  # columns
_BYTES = PANEL * 4
_STEP = LANES * 4
_AHEAD = 24  # inputs whose weights are on their way


@njit(inline="always")
def _fetch(w, step, depth, soon):  # type: ignore[no-untyped-def]
    """The weights of the input that is `_AHEAD` of this one."""
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
    """to [rows up to fours, 64] = x [rows, K] · w [K, 64]. The last of four rows may be repeated."""
    last = x + (rows - 1) * x_row
    if rows == 1:
        _one(to, x, w, depth, soon)
    else:
        for r in range(0, rows, 4):
            x0 = x + r * x_row
            x1, x2, x3 = min(x0 + x_row, last), min(x0 + 2 * x_row, last), min(x0 + 3 * x_row, last)
            _four(to + r * _BYTES, x0, x1, x2, x3, w, depth, soon if r + 4 >= rows else w)
