"""Blocks of GGUF's Q4_K and Q6_K, which the package `gguf` reads and does not write.

Groups are rounded to the nearest codes between their extremes, without llama.cpp's search for better scales:
sizes and layouts are those of its files, and the numbers are near the original ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

BLOCK = 256


def q4_k(rows: Array) -> Array:
    """Takes float32 [..., K], K a multiple of 256, and returns blocks, uint8 [..., K / 256 · 144]."""
    groups = rows.reshape(-1, 8, 32)
    least = np.minimum(groups.min(-1), 0.0)
    scale, scales = _coded((groups.max(-1) - least) / 15, 63)
    minimum, minima = _coded(-least, 63)
    step = scale.astype(np.float32) * scales
    below = (minimum.astype(np.float32) * minima)[..., None]
    codes = np.rint((groups + below) / np.where(step, step, 1.0)[..., None]).clip(0, 15).astype(np.uint8)
    halves = codes.reshape(-1, 4, 2, 32)
    scales, minima = scales.astype(np.uint8), minima.astype(np.uint8)
    sixes = (
        scales[:, :4] | (scales[:, 4:] >> 4) << 6,
        minima[:, :4] | (minima[:, 4:] >> 4) << 6,
        scales[:, 4:] & 15 | minima[:, 4:] << 4,
    )
    packed = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(-1, 128)
    return _rows((scale.view(np.uint8), minimum.view(np.uint8), *sixes, packed), rows)


def q6_k(rows: Array) -> Array:
    """Takes the same and returns uint8 [..., K / 256 · 210]."""
    groups = rows.reshape(-1, 16, 16)
    scale, scales = _coded(np.abs(groups).max(-1) / 31, 127)
    step = scale.astype(np.float32) * scales
    codes = np.rint(groups / np.where(step, step, 1.0)[..., None]).clip(-32, 31).astype(np.int8) + 32
    runs = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.concatenate(
        (runs[:, :, 0] & 15 | runs[:, :, 2] << 4, runs[:, :, 1] & 15 | runs[:, :, 3] << 4), -1
    )
    high = runs >> 4 << np.array([[0], [2], [4], [6]], np.uint8)
    high = np.bitwise_or.reduce(high, axis=2)
    parts = low.reshape(-1, 128), high.reshape(-1, 64), scales.astype(np.int8).view(np.uint8)
    return _rows((*parts, scale.view(np.uint8)), rows)


def _coded(wanted: Array, most: int) -> tuple[Array, Array]:
    """Returns the factor of each block, float16 [blocks, 1], and for each of its groups a code from 0 to
    `most`, whose product with the factor is about what is wanted [blocks, groups]."""
    factor = (wanted.max(-1, keepdims=True) / most).astype(np.float16)
    wide = factor.astype(np.float32)
    return factor, np.rint(wanted / np.where(wide, wide, 1.0)).clip(0, most)


def _rows(parts: tuple[Array, ...], rows: Array) -> Array:
    return np.concatenate(parts, -1).reshape(*rows.shape[:-1], -1)
