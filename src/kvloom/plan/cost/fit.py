"""Least squares for a cost model's constants, all of which are positive."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Predict = Callable[[F64], F64]  # constants [C] → seconds [R]

_EASY: Final = 0.05  # errors beyond it count by their size, not its square: outliers do not decide
_STEP: Final = 1e-4  # of a logarithm, for slopes
_MOST: Final = 0.5  # that a logarithm moves at once
_REWEIGHTED: Final = 8


def fit_log(predict: Predict, seconds: F64, start: F64, *, rounds: int = 100) -> F64:
    """Returns the positive constants [C], from `start`, for which predict(constants) comes nearest to seconds
    [R]: by the logarithm of their ratio, after Levenberg (1944) and Marquardt (1963), with weights that tame
    outliers."""
    point, damping = np.log(start), 1e-2
    wrong = _wrong(predict, point, seconds)
    for _ in range(rounds):
        slopes = _slopes(predict, point, seconds, wrong)
        weights = 1.0 / np.sqrt(wrong**2 + _EASY**2)
        curve, down = slopes.T @ (slopes * weights[:, None]), slopes.T @ (weights * wrong)
        better = None
        while better is None and damping < 1e9:
            steps = np.linalg.solve(curve + damping * np.diag(np.diag(curve) + 1e-9), -down)
            moved = point + np.clip(steps, -_MOST, _MOST)
            then = _wrong(predict, moved, seconds)
            if _loss(then) < _loss(wrong):
                better = then
            else:
                damping *= 4.0
        if better is None:
            break
        gained = 1.0 - _loss(better) / _loss(wrong)
        point, wrong, damping = moved, better, max(damping / 3.0, 1e-9)
        if gained < 1e-7:
            break
    return np.exp(point)


def fit_positive(features: F64, seconds: F64) -> F64:
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


def _wrong(predict: Predict, point: F64, seconds: F64) -> F64:
    wrong: F64 = np.log(predict(np.exp(point)) / seconds)
    return wrong


def _slopes(predict: Predict, point: F64, seconds: F64, wrong: F64) -> F64:
    """Returns [R, C]: how each error changes with each logarithm."""
    slopes = np.empty((len(wrong), len(point)))
    for i in range(len(point)):
        moved = point.copy()
        moved[i] += _STEP
        slopes[:, i] = (_wrong(predict, moved, seconds) - wrong) / _STEP
    return slopes


def _loss(wrong: F64) -> float:
    return float(np.sum(np.sqrt(wrong**2 + _EASY**2) - _EASY))


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
