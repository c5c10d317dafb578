"""When requests come: renewal processes, at rates that may change with the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from pydantic import PlainValidator

from kvloom.types.geometry import F64, AnyArray
from kvloom.workload.fields import shown

_AT_ONCE: Final = 1024
_PIECE: Final = 32

Gaps = Callable[[np.random.Generator, int], F64]  # so many gaps between arrivals, of mean 1


def poisson(rng: np.random.Generator, count: int) -> F64:
    return rng.exponential(size=count)


def constant(_: np.random.Generator, count: int) -> F64:
    return np.ones(count)


def gamma(cv: float) -> Gaps:
    """Gaps of the Gamma distribution. cv: their standard deviation over their mean; 1 is Poisson, more comes
    in bursts (Llumnix, section 6.4)."""
    shape = cv**-2

    def gaps(rng: np.random.Generator, count: int) -> F64:
        return rng.gamma(shape, 1 / shape, count)

    return gaps


def _parse(value: Any) -> Gaps:
    """`poisson`, `constant`, or {cv: 4}: Gamma with that coefficient of variation."""
    match value:
        case "poisson":
            return poisson
        case "constant":
            return constant
        case {"cv": int() | float() as cv} if len(value) == 1 and 0.01 <= cv <= 100 and cv is not True:
            return gamma(cv)
    raise ValueError(f"{shown(value)}; poisson, constant, or {{cv: C}} with C from 0.01 to 100 is right")


Process = Annotated[Gaps, PlainValidator(_parse)]


@dataclass(frozen=True, slots=True)
class Steps:
    """Requests a second: of [K] equal steps that fill `period` seconds and then begin anew."""

    rates: F64
    period: float = 1.0

    def times(self, turns: F64) -> F64:
        """When so many arrivals [N] are to be expected since the start."""
        grid = np.linspace(0.0, self.period, len(self.rates) + 1)
        expected = np.concatenate(([0.0], np.cumsum(self.rates) * (self.period / len(self.rates))))
        whole, rest = np.divmod(turns, expected[-1])
        times: F64 = whole * self.period + np.interp(rest, expected, grid)
        return times


def arrivals(gaps: Gaps, rate: Steps, rng: np.random.Generator) -> Iterator[float]:
    """Seconds since the start, without end. Of a steady process the first is anywhere in its gap."""
    turn = -float(rng.random()) if gaps is constant else 0.0
    while True:
        turns = turn + np.cumsum(gaps(rng, _AT_ONCE))
        turn = float(turns[-1])
        yield from in_pieces(rate.times(turns))


def in_pieces(values: AnyArray) -> Iterator[Any]:
    """Yields Python's own numbers, few of them made ahead: most streams end soon."""
    for start in range(0, len(values), _PIECE):
        yield from values[start : start + _PIECE].tolist()
