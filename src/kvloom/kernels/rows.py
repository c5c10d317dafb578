"""What is done to one row of float32 values, by address: copy, normalise, rotate. Kernels share rows out."""

import numpy as np
from numba import njit

from kvloom.kernels.memory import read, write
from kvloom.kernels.vector import LANES, add, load, multiply, multiply_add, splat, store, subtract, total


@njit(inline="never")
def copy_row(to, source, size):  # type: ignore[no-untyped-def]
    """Copy `size` bytes."""
    whole = size // (LANES * 4) * LANES * 4
    for i in range(0, whole, LANES * 4):
        store(to + i, load(source + i))
    for i in range(whole, size, 4):
        write(to + i, read(source + i))


@njit(inline="never")
def norm_row(out, x, weight, size, eps, offset):  # type: ignore[no-untyped-def]
    """out = x / rms(x) · (offset + weight), `size` values each; out may be x."""
    row = size * 4
    pairs, whole = row // (LANES * 8) * LANES * 8, row // (LANES * 4) * LANES * 4
    even = odd = splat(0.0)
    for i in range(0, pairs, LANES * 8):
        p, q = load(x + i), load(x + i + LANES * 4)
        even, odd = multiply_add(p, p, even), multiply_add(q, q, odd)
    for i in range(pairs, whole, LANES * 4):
        even = multiply_add(load(x + i), load(x + i), even)
    squares = total(add(even, odd))
    for i in range(whole, row, 4):
        squares += read(x + i) * read(x + i)
    inverse = np.float32(1.0 / np.sqrt(squares / size + eps))
    for i in range(0, whole, LANES * 4):
        normal = multiply(load(x + i), splat(inverse))
        store(out + i, multiply(add(splat(offset), load(weight + i)), normal))
    for i in range(whole, row, 4):
        write(out + i, (np.float32(offset) + read(weight + i)) * (read(x + i) * inverse))


@njit(inline="never")
def rotate_row(x, cos, sin, size):  # type: ignore[no-untyped-def]
    """Rotate the first `size` values of a head in place; i pairs with size/2 + i."""
    half = size * 2
    whole = half // (LANES * 4) * LANES * 4
    high = x + half
    for i in range(0, whole, LANES * 4):
        p, q = load(x + i), load(high + i)
        turned = multiply(q, load(sin + i))
        store(x + i, subtract(multiply(p, load(cos + i)), turned))
        turned = multiply(p, load(sin + half + i))
        store(high + i, multiply_add(q, load(cos + half + i), turned))
    for i in range(whole, half, 4):
        u, w = read(x + i), read(high + i)
        write(x + i, u * read(cos + i) - w * read(sin + i))
        write(high + i, w * read(cos + half + i) + u * read(sin + half + i))
