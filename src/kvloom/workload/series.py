"""What happened when: sums over equal stretches of time, at most so many of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MOST: Final = 256  # stretches; past that, two become one


class Series:
    """From 0 on. Starts with stretches of `width` seconds, which double as time goes on."""

    def __init__(self, width: float = 1 / 64) -> None:
        self.width = width
        self._sums: list[float] = []

    def add(self, begin: float, end: float, amount: float) -> None:
        """`amount`, evenly from `begin` to `end`."""
        while end >= MOST * self.width:
            self._double()
        first, last = int(begin / self.width), int(end / self.width)
        self._sums += [0.0] * (last + 1 - len(self._sums))
        if first == last:
            self._sums[last] += amount
            return
        pace = amount / (end - begin)
        self._sums[first] += ((first + 1) * self.width - begin) * pace
        self._sums[last] += (end - last * self.width) * pace
        for stretch in range(first + 1, last):
            self._sums[stretch] += self.width * pace

    def sums(self, width: float) -> list[float]:
        """Of stretches of `width` seconds, which is ours or a power of two times it."""
        while self.width < width:
            self._double()
        return list(self._sums)

    def _double(self) -> None:
        self.width *= 2
        odd: Sequence[float] = [*self._sums[1::2], 0.0][: len(self._sums[::2])]
        self._sums = [a + b for a, b in zip(self._sums[::2], odd, strict=True)]
