"""Fits by least squares without negative coefficients, curves that are fitted so, and the error of a fit."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvloom.types.geometry import F64

_EASY: Final = 0.05  # errors beyond it count by their size, not its square: outliers do not decide
_REWEIGHTED: Final = 8


def fit_nonnegative(features: F64, seconds: F64) -> F64:
    """Returns the coefficients ≥ 0 [C] for which features [R, C] @ coefficients comes nearest to seconds [R]:
    by the ratio, with weights that tame outliers."""
    scale = np.abs(features).max(axis=0)
    scale[scale == 0.0] = 1.0
    ratios = features / scale / seconds[:, None]
    weights = np.ones(len(seconds))
    for _ in range(_REWEIGHTED):
        found = _least_squares(ratios * weights[:, None], weights)
        weights = ((ratios @ found - 1.0) ** 2 + _EASY**2) ** -0.25
    coefficients: F64 = found / scale
    return coefficients


def _least_squares(a: F64, b: F64) -> F64:
    """Returns x ≥ 0 for which a @ x is nearest to b: the active set method of Lawson and Hanson (Solving
    Least Squares Problems, 1974, chapter 23)."""
    out, held = np.zeros(a.shape[1]), np.zeros(a.shape[1], bool)  # held: those that may be more than 0
    for _ in range(3 * a.shape[1]):
        gain = np.where(held, -np.inf, a.T @ (b - a @ out))
        if gain.max(initial=-np.inf) <= 1e-9:
            break
        held[gain.argmax()] = True
        while True:
            best = np.zeros_like(out)
            best[held] = np.linalg.lstsq(a[:, held], b, rcond=None)[0]
            falling = held & (best <= 0.0)
            if not falling.any():
                break
            way = (out[falling] / (out[falling] - best[falling])).min()
            out = out + way * (best - out)
            held &= out > 1e-12
            out[~held] = 0.0
        out = best
    return out


class Curve:
    """A curve seconds(x, a, b, c) = f(x) + k·(a, b, c), in which f is linear between knots. f never falls and
    no k is negative, so more work never takes less time."""

    def __init__(
        self, knots: Sequence[float], values: Sequence[float], slope: float, others: Sequence[float]
    ) -> None:
        """`values` are those at the knots, which rise from 0 on; `slope` is the one beyond the last knot;
        `others` are the three factors k."""
        self._knots = list(knots)
        self._values = list(values)
        self._slopes = [
            (values[i + 1] - values[i]) / (knots[i + 1] - knots[i]) for i in range(len(knots) - 1)
        ] + [slope]
        self._a, self._b, self._c = others

    @staticmethod
    def fit(x: Sequence[float], others: Sequence[Sequence[float]], seconds: Sequence[float]) -> Curve:
        """Returns the curve that fits x [R] and others [R, 3]. The knots are those x that come more than
        once, but for the smallest and the largest, past which lines go on."""
        often = sorted(value for value, times in Counter(x).items() if times > 1)
        knots = [0.0, *(value for value in often if min(x) < value < max(x))]
        at = np.asarray(x, float)[:, None]
        begins, ends = np.array(knots), np.array([*knots[1:], np.inf])
        rises = np.clip(at - begins, 0.0, ends - begins)
        features = np.column_stack([np.ones(len(x)), rises, np.asarray(others, float)])
        found = fit_nonnegative(features, np.asarray(seconds, float))
        slopes = found[1 : 1 + len(knots)]
        values = found[0] + np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(begins))])
        return Curve(knots, values.tolist(), float(slopes[-1]), found[1 + len(knots) :].tolist())

    def seconds(self, x: float, a: float, b: float, c: float) -> float:
        i = bisect_right(self._knots, x) - 1
        return (
            self._values[i] + self._slopes[i] * (x - self._knots[i]) + self._a * a + self._b * b + self._c * c
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of |predicted / measured − 1| over `rows` rows: median and 90th percentile. `bias` is the
    median of predicted / measured − 1."""

    rows: int
    median: float
    p90: float
    bias: float

    @staticmethod
    def of(predicted: Sequence[float], measured: Sequence[float]) -> Spread:
        """Returns the spread of rows in the same order, one at least."""
        wrong = np.asarray(predicted) / np.asarray(measured) - 1.0
        off = np.abs(wrong)
        return Spread(len(off), float(np.median(off)), float(np.quantile(off, 0.9)), float(np.median(wrong)))
