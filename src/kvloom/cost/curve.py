"""A time that grows with one number piece by piece, and with others in proportion."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvloom.cost.fit import fit_positive


class Curve:
    """seconds(x, a, b, c) = f(x) + k·(a, b, c), f linear between knots. f never falls and no k is negative,
    so more work never takes less time."""

    def __init__(
        self, knots: Sequence[float], values: Sequence[float], slope: float, others: Sequence[float]
    ) -> None:
        """values: at the knots, which rise from 0 on; slope: beyond the last. others: three."""
        self._knots = list(knots)
        self._values = list(values)
        self._slopes = [
            (values[i + 1] - values[i]) / (knots[i + 1] - knots[i]) for i in range(len(knots) - 1)
        ] + [slope]
        self._a, self._b, self._c = others

    @staticmethod
    def fit(x: Sequence[float], others: Sequence[Sequence[float]], seconds: Sequence[float]) -> Curve:
        """x [R]; others [R, 3]. The knots are those x that come more than once, but for the smallest and the
        largest, past which lines go on."""
        often = sorted(value for value, times in Counter(x).items() if times > 1)
        knots = [0.0, *(value for value in often if min(x) < value < max(x))]
        at = np.asarray(x, float)[:, None]
        begins, ends = np.array(knots), np.array([*knots[1:], np.inf])
        rises = np.clip(at - begins, 0.0, ends - begins)
        features = np.column_stack([np.ones(len(x)), rises, np.asarray(others, float)])
        found = fit_positive(features, np.asarray(seconds, float))
        slopes = found[1 : 1 + len(knots)]
        values = found[0] + np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(begins))])
        return Curve(knots, values.tolist(), float(slopes[-1]), found[1 + len(knots) :].tolist())

    def seconds(self, x: float, a: float, b: float, c: float) -> float:
        i = bisect_right(self._knots, x) - 1
        return (
            self._values[i] + self._slopes[i] * (x - self._knots[i]) + self._a * a + self._b * b + self._c * c
        )
