"""SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): numbers that look random, each a function of another."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


def mix(value: int) -> int:
    """64 bits, one step from `value`."""
    z = (value + GOLDEN) & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


def mixed(z: U64) -> U64:
    """The same of each."""
    z = z + np.uint64(GOLDEN)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)
