"""What is drawn from a seed, in the simplest words."""

from __future__ import annotations

import random


class Dice:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def _odds(self, of: float) -> bool:
        return self._random.random() < of

    def _count(self, least: int, most: int) -> int:
        return self._random.randint(least, most)

    def _moment(self) -> float:
        """Seconds: of a job, of a few, of a lease."""
        return self._random.choice((0.002, 0.02, 0.2, 2.0)) * self._random.uniform(0.5, 2.0)
