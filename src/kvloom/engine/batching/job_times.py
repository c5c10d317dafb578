"""Measures what a model's jobs took of late, and expects the next ones to take as long."""

from __future__ import annotations

from collections import deque
from statistics import median

from kvloom.engine.batching.adbs import WEIGHTS
from kvloom.types.job import Phase
from kvloom.types.load import STEP_WINDOW


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
    """How fast the last prefill jobs went, on what else ran beside them. A long job counts for more than a
    short one, as it does for those who wait."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=STEP_WINDOW)

    def note(self, tokens: int, seconds: float) -> None:
        """Notes one more job."""
        self._last.append((tokens, seconds))

    @property
    def tokens_a_second(self) -> float:
        """Returns 0 if there was no job yet."""
        seconds = sum(seconds for _, seconds in self._last)
        return sum(tokens for tokens, _ in self._last) / seconds if seconds > 0 else 0.0


class JobTimes:
    """Expects of a job what the last ones took: so much for each of its tokens, and of a decode step so much
    beside."""

    def __init__(self) -> None:
        self._prompts: deque[tuple[int, float]] = deque(maxlen=STEP_WINDOW)
        self._steps: deque[tuple[int, float]] = deque(maxlen=STEP_WINDOW)
        self.token = 0.0
        """Seconds of a token of a prompt, and of a sequence more in a step; 0 if there was no job yet."""
        self._base = 0.0

    def note(self, phase: Phase, tokens: int, seconds: float) -> None:
        """Notes a job of so many tokens, or one step of it."""
        if phase is Phase.DECODE:
            self._steps.append((tokens, seconds))
        else:
            self._prompts.append((tokens + WEIGHTS, seconds))
        if self._prompts:
            self.token = sum(took for _, took in self._prompts) / sum(count for count, _ in self._prompts)
        beside = [took - count * self.token for count, took in self._steps]
        self._base = max(0.0, median(beside)) if beside else WEIGHTS * self.token

    def prompt(self, tokens: int) -> float:
        """Returns the seconds of a prefill or a mixed job of so many tokens."""
        return (WEIGHTS + tokens) * self.token

    def step(self, sequences: int) -> float:
        """Returns the seconds of a decode step; 0 of none."""
        return self._base + sequences * self.token if sequences else 0.0
