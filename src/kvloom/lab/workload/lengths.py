"""The lengths of prompts and answers: distributions of token counts, and those of published traces."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, NamedTuple, Protocol

import numpy as np

from kvloom.types.geometry import I64


class Tokens(Protocol):
    """A distribution of token counts, all of at least 1."""

    def draw(self, rng: np.random.Generator, count: int) -> I64: ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """A distribution over low, …, high, each with the same probability."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> I64:
        return rng.integers(self.low, self.high, count, endpoint=True)


@dataclass(frozen=True, slots=True)
class Zipf:
    """A distribution in which short lengths are frequent: rank k of 1, …, 2·mean − 1 has a probability in
    proportion to k^-exponent, and ranks times whatever brings their mean to `mean` are tokens, at most `most`
    (Llumnix, section 6.1)."""

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
    """Returns the numbers rounded, and at least 1."""

    mean: float
    deviation: float

    def draw(self, rng: np.random.Generator, count: int) -> I64:
        drawn = np.rint(rng.normal(self.mean, self.deviation, count))
        return np.maximum(drawn, 1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal distribution. Counts that are not between `least` and `most` are drawn anew."""

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
    """A distribution that is log-normal in pieces: the logarithm of the tokens is linear in the normal
    variate between two percentiles, and goes on as straight beyond the outer two."""

    points: tuple[tuple[float, int], ...]
    """The pairs (percentile, tokens), ascending."""
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


class Sides(NamedTuple):
    """The lengths of prompts and of answers, each drawn by itself."""

    prompt: Tokens
    output: Tokens


def _same(tokens: Tokens) -> Sides:
    return Sides(tokens, tokens)


_LONGEST: Final = 6144  # tokens of Llumnix's sequences

# Lengths of published traces, as distributions that have their percentiles and means. The percentiles are
# those that papers and data sets publish, but for P10: that is chosen so that the mean is right. Of ShareGPT
# as MuxServe uses it and of ChatLMSYS only the means are published; their spread is a guess.
STAND_INS: Final[dict[str, Sides]] = {
    # MuxServe, section 2.1: means 161 and 338, prompts of 4 to 1,024 tokens
    "sharegpt": Sides(LogNormal(90, 1.4, 4, 1024), LogNormal(230, 1.0, 4, 2044)),
    # Llumnix, table 1: conversations with GPT-4
    "sharegpt-gpt4": Sides(
        Percentiles(((50, 74), (80, 348), (95, 1484), (99, 3388)), _LONGEST),
        Percentiles(((10, 140), (50, 487), (80, 781), (95, 988), (99, 1234)), _LONGEST),
    ),
    # Llumnix, table 1: BurstGPT, the requests to GPT-4
    "burstgpt": Sides(
        Percentiles(((10, 115), (50, 582), (80, 1427), (95, 2345), (99, 3549)), _LONGEST),
        Percentiles(((10, 40), (50, 243), (80, 434), (95, 669), (99, 964)), _LONGEST),
    ),
    # Azure Public Dataset, the conversations of 2023
    "azure-conversation": Sides(
        Percentiles(((25, 396), (50, 1020), (80, 1315), (90, 2734), (95, 4083), (99, 4142)), 14050),
        Percentiles(((25, 85), (50, 129), (80, 400), (90, 424), (95, 451), (99, 601)), 1000),
    ),
    # MuxServe, section 4.3: means 100 and 261
    "chatlmsys": Sides(LogNormal(50, 1.3, 4, 1024), LogNormal(168, 1.0, 4, 2044)),
    # Llumnix, table 1: short, medium and long
    "zipf-s": _same(Zipf(128, 2.0, _LONGEST)),
    "zipf-m": _same(Zipf(256, 1.5, _LONGEST)),
    "zipf-l": _same(Zipf(512, 1.15, _LONGEST)),
}


def coupled(prompts: I64, outputs: I64, rank: float, rng: np.random.Generator) -> I64:
    """Returns the same outputs in an order in which their rank correlation with the prompts is about `rank`,
    in [-1, 1]: normal scores of both have the joint distribution that gives it (Iman and Conover, "A
    distribution-free approach to inducing rank correlation among input variables", 1982)."""
    together = 2 * math.sin(math.pi * rank / 6)  # of normal scores, for Spearman's coefficient
    of_prompts = np.sort(rng.standard_normal(prompts.size))[_ranks(prompts)]
    others = rng.standard_normal(prompts.size)
    of_outputs = together * of_prompts + math.sqrt(1 - together**2) * others
    reordered: I64 = np.sort(outputs)[_ranks(of_outputs)]
    return reordered


def _ranks(values: np.ndarray) -> I64:
    order: I64 = np.argsort(np.argsort(values, kind="stable"), kind="stable")
    return order
