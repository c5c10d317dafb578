"""Measures how often a model was asked of late, and what its jobs took, and expects the same to come."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Final

from kvloom.types.clock import Clock
from kvloom.types.job import Phase
from kvloom.types.load import STEP_WINDOW

WEIGHT_READ_TOKENS: Final = 16
"""Tokens of which a model's matrix products take as long on cores as reading its weights once."""
MEMORY: Final = 60.0  # seconds after which what came counts for 1 / e


class ArrivalRate:
    """The recent rate of arrivals, in sequences a second: each arrival counts for less as time goes by."""

    def __init__(self, clock: Clock, planned: float = 0.0) -> None:
        """planned: sequences a second that are expected at first."""
        self._clock = clock
        self._count = planned * MEMORY
        self._at = clock.now()

    def note(self) -> None:
        """Notes that a sequence has come."""
        self._count, self._at = self._left() + 1, self._clock.now()

    @property
    def a_second(self) -> float:
        return self._left() / MEMORY

    def _left(self) -> float:
        return self._count * math.exp((self._at - self._clock.now()) / MEMORY)


class StepTime:
    """The running median of what a decode step takes; one slow step does not move it."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=STEP_WINDOW)

    def note(self, seconds: float) -> None:
        """Notes the seconds of one more step."""
        self._last.append(seconds)

    @property
    def seconds(self) -> float:
        """Seconds of a step; 0 if there was none yet."""
        return median(self._last) if self._last else 0.0

    @property
    def least(self) -> float:
        """Seconds that the next step takes at least, as far as is known: no more than the last one, which may
        have had fewer sequences. 0 before there were `STEP_WINDOW` steps: the first ones take longer."""
        return min(self.seconds, self._last[-1]) if len(self._last) == STEP_WINDOW else 0.0


class PrefillSpeed:
    """The speed of the last prefill jobs, whatever ran beside them. A long job counts for more than a short
    one, as it does for those who wait."""

    def __init__(self) -> None:
        self._tokens: deque[int] = deque(maxlen=STEP_WINDOW)
        self._seconds: deque[float] = deque(maxlen=STEP_WINDOW)
        self.tokens_a_second = 0.0
        """0 if there was no job yet."""

    def note(self, tokens: int, seconds: float) -> None:
        """Notes one more job."""
        self._tokens.append(tokens)
        self._seconds.append(seconds)
        whole = sum(self._seconds)
        self.tokens_a_second = sum(self._tokens) / whole if whole > 0 else 0.0


class JobTimes:
    """Estimates a job's seconds from the last jobs: so much for each token, and for a decode step so much in
    addition."""

    def __init__(self) -> None:
        self._tokens: deque[int] = deque(maxlen=STEP_WINDOW)
        self._seconds: deque[float] = deque(maxlen=STEP_WINDOW)
        self._steps: deque[tuple[int, float]] = deque(maxlen=STEP_WINDOW)
        self.token = 0.0
        """Seconds of a token of a prompt, and of a sequence more in a step; 0 if there was no job yet."""
        self._base = 0.0

    def note(self, phase: Phase, tokens: int, seconds: float) -> None:
        """Notes a job of so many tokens, or one step of it."""
        if phase is Phase.DECODE:
            self._steps.append((tokens, seconds))
        else:
            self._tokens.append(tokens + WEIGHT_READ_TOKENS)
            self._seconds.append(seconds)
            self.token = sum(self._seconds) / sum(self._tokens)
        beside = [took - count * self.token for count, took in self._steps]
        self._base = max(0.0, median(beside)) if beside else WEIGHT_READ_TOKENS * self.token

    def prompt(self, tokens: int) -> float:
        """Returns the seconds of a prefill or a mixed job of so many tokens."""
        return (WEIGHT_READ_TOKENS + tokens) * self.token

    def step(self, sequences: int) -> float:
        """Returns the seconds of a decode step; 0 of none."""
        return self._base + sequences * self.token if sequences else 0.0
