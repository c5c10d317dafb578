"""How far predictions lie from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """Of |predicted / measured − 1| over `rows` rows: the median and the 90th percentile. bias: the median of
    predicted / measured − 1."""

    rows: int
    median: float
    p90: float
    bias: float

    @staticmethod
    def of(predicted: Sequence[float], measured: Sequence[float]) -> Spread:
        """Of rows in the same order, one at least."""
        wrong = np.asarray(predicted) / np.asarray(measured) - 1.0
        off = np.abs(wrong)
        return Spread(len(off), float(np.median(off)), float(np.quantile(off, 0.9)), float(np.median(wrong)))
