"""Products of rows by panels, the packed form of weights of 16 and 32 bits: what formats have in common, and
the product over float32.

A panel has 64 outputs, and lies in steps of 256 bytes: the weights of one input in float32, of two inputs in
16 bits. A row's sums are four vectors. Four rows at a time share a step's loads, and what is read next is
fetched meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from numba import njit

from kvloom.kernels.cpu.lanes.floats import LANES, load, multiply_add, splat, store, variant
from kvloom.kernels.cpu.memory import prefetch, read

PANEL: Final = 64  # outputs
STEP_BYTES: Final = PANEL * 4  # of a step's weights, and of a row's sums
VECTOR: Final = LANES * 4  # bytes
_AHEAD = 24  # steps that are on their way


@njit(inline="always")
def prefetch_ahead(w, step, steps, soon):  # type: ignore[no-untyped-def]
    """Fetches the step that is `_AHEAD` of this one. soon: the address of what is read after this panel."""
    ahead = step + _AHEAD
    at = w + ahead * STEP_BYTES if ahead < steps else soon + (ahead - steps) * STEP_BYTES
    for line in range(0, STEP_BYTES, VECTOR):
        prefetch(at + line)


@njit(inline="always")
def store_four(to, s0, s1, s2, s3):  # type: ignore[no-untyped-def]
    """Stores the sums of a row."""
    store(to, s0)
    store(to + VECTOR, s1)
    store(to + 2 * VECTOR, s2)
    store(to + 3 * VECTOR, s3)


def any_rows(one: Callable[..., Any], four: Callable[..., Any]) -> Any:
    """Makes the product of any rows and a panel of those of one row and of four: to [rows up to fours, 64] =
    x [rows, K] · w [K, 64]. The last of four rows may be repeated. soon: the address of what is read next."""

    @variant(one, four)
    def rows_by_panel(to, x, x_row, rows, w, depth, soon):  # type: ignore[no-untyped-def]
        last = x + (rows - 1) * x_row
        if rows == 1:
            one(to, x, w, depth, soon)
        else:
            for r in range(0, rows, 4):
                x0 = x + r * x_row
                x1, x2, x3 = min(x0 + x_row, last), min(x0 + 2 * x_row, last), min(x0 + 3 * x_row, last)
                four(to + r * STEP_BYTES, x0, x1, x2, x3, w, depth, soon if r + 4 >= rows else w)

    return rows_by_panel


def stepwise_product(load_weights: Any, splat_inputs: Any, accumulate: Any) -> Any:
    """Makes the product of any rows and a panel, of which each step multiplies four bytes of a row, in every
    lane of a vector (`splat_inputs`), by four vectors of weights (`load_weights`). accumulate: returns sums +
    weights · inputs. The product's depth is in steps."""
    parts = load_weights, splat_inputs, accumulate

    @variant(*parts)
    def one(to, x, w, steps, soon):  # type: ignore[no-untyped-def]
        s0 = s1 = s2 = s3 = splat(0.0)
        for k in range(steps):
            prefetch_ahead(w, k, steps, soon)
            at, a = w + k * STEP_BYTES, splat_inputs(x + k * 4)
            s0 = accumulate(s0, load_weights(at), a)
            s1 = accumulate(s1, load_weights(at + VECTOR), a)
            s2 = accumulate(s2, load_weights(at + 2 * VECTOR), a)
            s3 = accumulate(s3, load_weights(at + 3 * VECTOR), a)
        store_four(to, s0, s1, s2, s3)

    @variant(*parts)
    def four(to, x0, x1, x2, x3, w, steps, soon):  # type: ignore[no-untyped-def]
        a0 = a1 = a2 = a3 = splat(0.0)
        b0 = b1 = b2 = b3 = splat(0.0)
        c0 = c1 = c2 = c3 = splat(0.0)
        d0 = d1 = d2 = d3 = splat(0.0)
        for k in range(steps):
            prefetch_ahead(w, k, steps, soon)
            at, i = w + k * STEP_BYTES, k * 4
            w0, w1 = load_weights(at), load_weights(at + VECTOR)
            w2, w3 = load_weights(at + 2 * VECTOR), load_weights(at + 3 * VECTOR)
            a, b = splat_inputs(x0 + i), splat_inputs(x1 + i)
            c, d = splat_inputs(x2 + i), splat_inputs(x3 + i)
            a0, a1 = accumulate(a0, w0, a), accumulate(a1, w1, a)
            a2, a3 = accumulate(a2, w2, a), accumulate(a3, w3, a)
            b0, b1 = accumulate(b0, w0, b), accumulate(b1, w1, b)
            b2, b3 = accumulate(b2, w2, b), accumulate(b3, w3, b)
            c0, c1 = accumulate(c0, w0, c), accumulate(c1, w1, c)
            c2, c3 = accumulate(c2, w2, c), accumulate(c3, w3, c)
            d0, d1 = accumulate(d0, w0, d), accumulate(d1, w1, d)
            d2, d3 = accumulate(d2, w2, d), accumulate(d3, w3, d)
        store_four(to, a0, a1, a2, a3)
        store_four(to + STEP_BYTES, b0, b1, b2, b3)
        store_four(to + 2 * STEP_BYTES, c0, c1, c2, c3)
        store_four(to + 3 * STEP_BYTES, d0, d1, d2, d3)

    return any_rows(one, four)


@njit(inline="always")
def _splat_float(at):  # type: ignore[no-untyped-def]
    return splat(read(at))


@njit(inline="always")
def _add_product(sums, weights, inputs):  # type: ignore[no-untyped-def]
    return multiply_add(inputs, weights, sums)


panel_product = stepwise_product(load, _splat_float, _add_product)
