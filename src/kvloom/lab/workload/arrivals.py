"""Arrivals: when requests come, and for which model. There are renewal processes, rates that change, and the
power law."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvloom.types.geometry import F64, AnyArray

_AT_ONCE: Final = 1024
_PIECE: Final = 32

Gaps = Callable[[np.random.Generator, int], F64]
"""Returns so many gaps between arrivals, of mean 1."""


def poisson(rng: np.random.Generator, count: int) -> F64:
    return rng.exponential(size=count)


def constant(_: np.random.Generator, count: int) -> F64:
    return np.ones(count)


def gamma(cv: float) -> Gaps:
    """Returns gaps of the Gamma distribution whose coefficient of variation is `cv`: 1 is Poisson, and more
    comes in bursts (Llumnix, section 6.4)."""
    shape = cv**-2

    def gaps(rng: np.random.Generator, count: int) -> F64:
        return rng.gamma(shape, 1 / shape, count)

    return gaps


@dataclass(frozen=True, slots=True)
class Steps:
    """A rate that changes with the time."""

    rates: F64
    """The requests a second [K] of K equal steps that fill `period` and then begin anew."""
    period: float = 1.0
    """The seconds of a period."""

    def times(self, turns: F64) -> F64:
        """Returns the times [N], in seconds, by which so many arrivals [N] are expected since the start."""
        grid = np.linspace(0.0, self.period, len(self.rates) + 1)
        expected = np.concatenate(([0.0], np.cumsum(self.rates) * (self.period / len(self.rates))))
        whole, rest = np.divmod(turns, expected[-1])
        times: F64 = whole * self.period + np.interp(rest, expected, grid)
        return times


def arrivals(gaps: Gaps, rate: Steps, rng: np.random.Generator) -> Iterator[float]:
    """Yields arrivals in seconds since the start, without end. The first one of a steady process lies
    anywhere in its gap."""
    turn = -float(rng.random()) if gaps is constant else 0.0
    while True:
        turns = turn + np.cumsum(gaps(rng, _AT_ONCE))
        turn = float(turns[-1])
        yield from in_pieces(rate.times(turns))


def power_law(models: int, alpha: float) -> F64:
    """Returns [models] shares of sum 1; share i is in proportion to (i + 1)^-alpha (MuxServe,
    section 4.2)."""
    weights = np.arange(1, models + 1, dtype=np.float64) ** -alpha
    shares: F64 = weights / weights.sum()
    return shares


def in_pieces(values: AnyArray) -> Iterator[Any]:
    """Yields Python's own numbers, few of them made ahead: most streams end soon."""
    for start in range(0, len(values), _PIECE):
        yield from values[start : start + _PIECE].tolist()
