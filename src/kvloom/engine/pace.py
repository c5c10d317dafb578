"""How long a model's decode steps take of late."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

WINDOW: Final = 16  # steps


class Pace:
    """The running median, which one slow step does not move."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=WINDOW)

    def note(self, seconds: float) -> None:
        """Of one more step."""
        self._last.append(seconds)

    @property
    def seconds(self) -> float:
        """Of a step; 0 where there was none yet."""
        return median(self._last) if self._last else 0.0

    @property
    def least(self) -> float:
        """Of the next step, as far as is known: no more than of the last one, which may have been of fewer
        sequences. 0 before there were `WINDOW`: first ones take longer."""
        return min(self.seconds, self._last[-1]) if len(self._last) == WINDOW else 0.0
