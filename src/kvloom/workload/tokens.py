"""Distributions of token counts."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np

from kvloom.types.geometry import I64


class Tokens(Protocol):
    """A distribution of token counts, all of at least 1."""

    def draw(self, rng: np.random.Generator, count: int) -> I64: ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """low, …, high, each as probable as the other."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> I64:
        return rng.integers(self.low, self.high, count, endpoint=True)


@dataclass(frozen=True, slots=True)
class Zipf:
    """The shorter, the more: rank k of 1, …, 2·mean − 1 with probability in proportion to k^-exponent; ranks
    times whatever brings their mean to `mean` are tokens, at most `most` (Llumnix, section 6.1)."""

    mean: int
    exponent: float
    most: int

    def draw(self, rng: np.random.Generator, count: int) -> I64:
        ranks = np.arange(1, 2 * self.mean)
        chances = ranks**-self.exponent
        chances /= chances.sum()
        scale = self.mean / float(ranks @ chances)
        drawn = np.ceil(rng.choice(ranks, count, p=chances) * scale)
        return np.minimum(drawn, self.most).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Normal:
    """Rounded, and 1 at least."""

    mean: float
    deviation: float

    def draw(self, rng: np.random.Generator, count: int) -> I64:
        drawn = np.rint(rng.normal(self.mean, self.deviation, count))
        return np.maximum(drawn, 1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """What is not between `least` and `most` is drawn anew."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, rng: np.random.Generator, count: int) -> I64:
        drawn = np.zeros(count)
        while (outside := (drawn < self.least) | (drawn > self.most)).any():
            z = rng.standard_normal(int(outside.sum()))
            drawn[outside] = np.rint(self.median * np.exp(self.sigma * z))
        return drawn.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Log-normal in pieces: the logarithm of the tokens is linear in the normal variate between these
    percentiles, (p, tokens) each, and goes on as straight beyond the outer two."""

    points: tuple[tuple[float, int], ...]
    most: int

    def draw(self, rng: np.random.Generator, count: int) -> I64:
        inverse = NormalDist().inv_cdf
        at = np.array([inverse(p / 100) for p, _ in self.points])
        logs = np.log([tokens for _, tokens in self.points])
        z = rng.standard_normal(count)
        slopes = np.diff(logs) / np.diff(at)
        bent = np.interp(z, at, logs)
        bent += np.minimum(z - at[0], 0) * slopes[0] + np.maximum(z - at[-1], 0) * slopes[-1]
        return np.clip(np.rint(np.exp(bent)), 1, self.most).astype(np.int64)
