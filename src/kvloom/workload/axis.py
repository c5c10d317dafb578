"""A chart's axis: from values to places, and where its marks stand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Axis:
    """low < high; above 0 where it is logarithmic. show: a mark's value as text."""

    low: float
    high: float
    show: Callable[[float], str]
    log: bool = False

    @staticmethod
    def over(values: list[float], show: Callable[[float], str], *, log: bool = False) -> Axis:
        """As long as the values need: from 0, or, where it is logarithmic, from a round number below the
        least that is above 0."""
        above = [value for value in values if value > 0]
        if not log:
            return Axis(0.0, max(above, default=1.0) * 1.04, show)
        low, high = _below(min(above, default=0.1)), max(above, default=1.0)
        return Axis(low, high if high > low * 1.5 else low * 10, show, log=True)

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end, and between them for every value."""
        if self.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(max(share, 0.0), 1.0)

    def marks(self, most: int = 8) -> list[float]:
        """Round values, at most about so many."""
        return self._log_marks(most) if self.log else self._even_marks(most)

    def _even_marks(self, most: int) -> list[float]:
        raw = (self.high - self.low) / most
        unit = 10 ** math.floor(math.log10(raw))
        step = next(step * unit for step in _STEPS if step * unit >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]

    def _log_marks(self, most: int) -> list[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            marks = [digit * 10.0**decade for decade in decades for digit in digits]
            marks = [mark for mark in marks if self.low * 0.999 <= mark <= self.high * 1.001]
            if len(marks) <= most:
                return marks
        return marks[:: -(-len(marks) // most)]


def _below(value: float) -> float:
    unit = 10.0 ** math.floor(math.log10(value))
    return max(step * unit for step in _STEPS if step * unit <= value * 1.001)
