"""Embedding lookup in a quantised head: unpacks single rows from its panels, which `panels.py` describes."""

from __future__ import annotations

import ctypes

import numpy as np
from numba import carray, njit

from kvloom.kernels.cpu.lanes.floats import read_float16
from kvloom.kernels.cpu.memory import address_of, fetch_add, read, read_int, write
from kvloom.kernels.cpu.parallel import kernel
from kvloom.kernels.cpu.quantized.panels import WIDTH, place_of
from kvloom.kernels.cpu.quantized.rows import FACTOR32, MULTIPLES, STEP, weight_at


class LookupArguments(ctypes.Structure):
    """The addresses and sizes of one call, after its counter. weight: of QuantizedArguments. ids: int32
    [rows]. to: rows of float32, to_row bytes apart."""

    _fields_ = [(name, ctypes.c_int64) for name in ("counter", "weight", "ids", "rows", "to", "to_row")]


@njit(inline="always")
def _factor(a, at, n, column):  # type: ignore[no-untyped-def]
    """Returns the scale, or the offset, of an output for the group n of a block."""
    if a.form == FACTOR32:
        return read(at + column * 4)
    shared = read_float16(at + column * 2)
    if a.form == MULTIPLES:
        number = read_int(at + WIDTH * 2 + n * WIDTH + column // 4 * 4) >> column % 4 * 8 & 255
        return shared * np.float32(number - 256 if number > 127 else number)
    return shared


@njit(inline="always")
def _codes(bits, w, step, column):  # type: ignore[no-untyped-def]
    """Returns an output's codes of a step's inputs, a byte each."""
    line, at = WIDTH * STEP, w + column * STEP
    if bits == 8:
        return read_int(at + step * line)
    if bits == 4:
        return read_int(at + (step >> 1) * line) >> (step & 1) * 4 & 0x0F0F0F0F
    at += (step >> 2) * 3 * line
    if step & 3 != 3:
        return read_int(at + (step & 3) * line) & 0x3F3F3F3F
    a, b, c = read_int(at), read_int(at + line), read_int(at + 2 * line)
    return (a >> 6 & 0x03030303) << 4 | (b >> 6 & 0x03030303) << 2 | c >> 6 & 0x03030303


@njit(inline="never")
def unpack_output(address, output, to, size):  # type: ignore[no-untyped-def]
    """Stores the first `size` inputs' weights of an output as float32. address: of QuantizedArguments."""
    a = weight_at(address)
    panel, column = a.panels + output // WIDTH * a.stride, output % WIDTH
    inputs, end = size // a.groups, to + size * 4
    for group in range(a.groups):
        at, n, w = place_of(a, panel, group)
        scale, offset = _factor(a, at, n, column), np.float32(0)
        if a.offset != 0:
            offset = _factor(a, at + a.offset, n, column)
        for i in range(0, inputs, STEP):
            codes = _codes(a.bits, w, i // STEP, column)
            for j in range(min(STEP, (end - to) // 4)):
                write(to, np.float32((codes >> 8 * j & 255) - a.zero) * scale + offset)
                to += 4


@kernel(LookupArguments)
def look_up(pointer):  # type: ignore[no-untyped-def]
    """Stores the weights of the outputs `ids`, a row each."""
    a, counter = carray(pointer, 1)[0], address_of(pointer)
    row = fetch_add(counter, 1)
    while row < a.rows:
        unpack_output(a.weight, read_int(a.ids + row * 4), a.to + row * a.to_row, a.to_row // 4)
        row = fetch_add(counter, 1)
