"""Rows of inputs, and what they become before they meet weights of few bits.

They stay float32, or they are rounded to bytes with a scale for each unit of neighbours.
"""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np
from numba import carray, njit

from kvloom.kernels.cpu.lanes.floats import (
    LANES,
    add,
    largest,
    load,
    magnitudes,
    maximum,
    multiply,
    multiply_add,
    splat,
    total,
)
from kvloom.kernels.cpu.lanes.integers import (
    add_ints,
    rounded,
    splat_int,
    store_bytes,
    total_int,
    write_int,
)
from kvloom.kernels.cpu.memory import pointer_at, write

STEP: Final = 4  # inputs of a lane
FACTOR32, FACTOR16, MULTIPLES = range(3)
_LINE: Final = LANES * 4


class QuantizedArguments(ctypes.Structure):
    """A weight in `count` panels of `stride` bytes, of `groups` groups of `units` units of `steps` steps. A
    block has 2 ** `shift` groups and `block_bytes` bytes: `head` that are no codes, then for each group
    `group_bytes` of codes. form: of scales and offsets, FACTOR32, FACTOR16 or MULTIPLES; offset: the first
    offset's byte in a block, 0 if there are none. exact: not 0 if inputs stay what they are."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("panels", "count", "stride", "bits", "groups", "units")),
        *((name, ctypes.c_int64) for name in ("steps", "shift", "block_bytes", "head", "group_bytes")),
        *((name, ctypes.c_int64) for name in ("form", "offset", "zero", "exact")),
    ]


def ready_bytes(weight: QuantizedArguments) -> int:
    """Returns the bytes that a row of inputs becomes: codes, for each unit a scale, then for each the int32
    - zero · (the sum of its codes), and for each group the sum of what its inputs are then."""
    units: int = weight.groups * weight.units
    size: int = units * (weight.steps * STEP + 8) + int(weight.groups) * 4
    return -(-size // _LINE) * _LINE


_WEIGHT = np.dtype(QuantizedArguments)


@njit(inline="always")
def weight_at(address):  # type: ignore[no-untyped-def]
    return carray(pointer_at(address), 1, _WEIGHT)[0]


@njit(inline="always")
def sums_of(a, row):  # type: ignore[no-untyped-def]
    """Returns where a row that is ready has the sums of its groups."""
    return row + a.groups * a.units * (a.steps * STEP + 8)


@njit(inline="never")
def _round_unit(x, to, size):  # type: ignore[no-untyped-def]
    """Rounds `size` inputs to bytes. Returns their scale and the sum of the bytes. The scale is no number if
    an input is infinite or none."""
    most = strange = splat(0.0)
    for i in range(0, size, LANES):
        values = load(x + i * 4)
        most, strange = maximum(magnitudes(values), most), multiply_add(values, splat(0.0), strange)
    top = largest(most)
    scale = top / np.float32(127.0) + total(strange)
    inverse = splat(np.float32(127.0) / top if top > np.float32(0.0) else np.float32(0.0))
    sums = splat_int(0)
    for i in range(0, size, LANES):
        codes = rounded(multiply(load(x + i * 4), inverse))
        sums = add_ints(sums, codes)
        store_bytes(to + i, codes)
    return scale, total_int(sums)


@njit(inline="never")
def _round_row(a, x, to):  # type: ignore[no-untyped-def]
    """Turns a row's inputs into bytes, and sums its groups."""
    size, many = a.steps * STEP, 4 * a.groups * a.units
    unit, sums = to + many * a.steps, sums_of(a, to)
    for g in range(a.groups):
        group = np.float32(0.0)
        for _ in range(a.units):
            scale, sum_ = _round_unit(x, to, size)
            write(unit, scale)
            write_int(unit + many, -a.zero * sum_)
            group += scale * np.float32(sum_)
            x, to, unit = x + size * 4, to + size, unit + 4
        write(sums + g * 4, group)


@njit(inline="never")
def _sum_row(a, x, to):  # type: ignore[no-untyped-def]
    """Sums the groups of a row's inputs."""
    size, at = a.units * a.steps * STEP, sums_of(a, to)
    for g in range(a.groups):
        sums = splat(0.0)
        for i in range(0, size, LANES):
            sums = add(sums, load(x + (g * size + i) * 4))
        write(at + g * 4, total(sums))


@njit(inline="never")
def make_row_ready(a, x, to):  # type: ignore[no-untyped-def]
    """Makes of a row of float32 what the products read."""
    if a.exact == 0:
        _round_row(a, x, to)
    else:
        _sum_row(a, x, to)
