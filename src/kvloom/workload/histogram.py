"""Quantiles of a stream of numbers in bounded memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

ERROR: Final = 0.004  # relative, of a quantile
LEAST: Final = 1e-9  # what is smaller counts as 0
_GAMMA: Final = (1 + ERROR) / (1 - ERROR)
_SCALE: Final = 1 / math.log(_GAMMA)


class Histogram:
    """DDSketch (Masson, Rim and Lee, VLDB 2019, section 2.1): counts in buckets whose borders are powers of
    one number. Mean, least and largest are exact. From 1 ns to 11 days it has 4,400 buckets at most."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.least = math.inf
        self.most = -math.inf
        self._small = 0
        self._buckets: dict[int, int] = defaultdict(int)

    @property
    def mean(self) -> float:
        """0 where nothing was added."""
        return self.total / self.count if self.count else 0.0

    def add(self, value: float) -> None:
        """Of at least 0."""
        self.count += 1
        self.total += value
        self.least = min(self.least, value)
        self.most = max(self.most, value)
        if value < LEAST:
            self._small += 1
        else:
            self._buckets[math.ceil(math.log(value) * _SCALE)] += 1

    def merge(self, other: Histogram) -> None:
        self.count += other.count
        self.total += other.total
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)
        self._small += other._small
        for bucket, count in other._buckets.items():
            self._buckets[bucket] += count

    def quantiles(self, at: Sequence[float]) -> list[float]:
        """For each q in [0, 1], in ascending order, the value of rank ⌊q · (count − 1)⌋, within ERROR of it;
        0 where nothing was added."""
        if not self.count:
            return [0.0] * len(at)
        found: list[float] = []
        buckets = iter(sorted(self._buckets))
        value, seen = 0.0, self._small
        for q in at:
            rank = math.floor(q * (self.count - 1))
            while seen <= rank:
                bucket = next(buckets)
                seen += self._buckets[bucket]
                value = 2 * _GAMMA**bucket / (_GAMMA + 1)
            last = rank == self.count - 1
            found.append(self.most if last else min(max(value, self.least), self.most))
        return found
