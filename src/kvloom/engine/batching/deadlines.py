"""Deadlines of a model's sequences.

A request's first token is due `ttft` after it came, and its token number i, from 0, `i * tpot` after the
first. A stream that is ahead of that has time to spare. It misses its objective if its first token is late,
or if it could not make up for its delay even if it were stepped without a pause to its last token.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

from kvloom.engine.batching.job_times import JobTimes
from kvloom.types.clock import Clock
from kvloom.types.spec import Slo

LEEWAY: Final = 0.1  # of what a stream could make up for by its last token, by which it may be behind


class Timed(Protocol):
    """A sequence, as far as its deadlines are concerned; see `Sequence`."""

    came: float | None
    first_at: float | None
    found: int
    missed: bool
    computed: int
    foreign: range

    @property
    def pending(self) -> int: ...

    @property
    def output_length(self) -> int: ...

    @property
    def remaining(self) -> int: ...


class Deadlines:
    """The deadlines of one model's sequences."""

    def __init__(self, slo: Slo, clock: Clock) -> None:
        self.slo = slo
        self.times = JobTimes()
        self._clock = clock

    def came(self, sequence: Timed) -> None:
        """Notes that a sequence is enqueued. One that has tokens from elsewhere begins a schedule of its own,
        by which its next one is due as if it were its first."""
        if sequence.came is None:
            sequence.came, sequence.found = self._clock.now(), len(sequence.foreign)
            if sequence.output_length:
                sequence.first_at = sequence.came + self.slo.ttft - sequence.output_length * self.slo.tpot

    @staticmethod
    def left(sequence: Timed) -> int:
        """Returns the tokens that the sequence still has to compute, as far as is known."""
        return max(1, sequence.pending - (0 if sequence.computed else sequence.found))

    def due(self, sequence: Timed) -> float:
        """Returns when the sequence's next token is due."""
        if sequence.first_at is None:
            return (sequence.came or 0.0) + self.slo.ttft
        return sequence.first_at + sequence.output_length * self.slo.tpot

    def latest(self, sequence: Timed) -> float:
        """Returns when the sequence's next token must have come, or it misses its objective."""
        if sequence.missed:
            return -math.inf
        if sequence.first_at is None:
            return self.due(sequence)
        return self.due(sequence) + sequence.remaining * max(0.0, self.slo.tpot - self.times.step(1))

    def step_due(self, sequence: Timed) -> float:
        """Returns the time at which the stream's next token is due if the stream may fall behind by a part,
        `LEEWAY`, of the delay that it could make up for."""
        due = self.due(sequence)
        return due + LEEWAY * (self.latest(sequence) - due)

    def begin_by(self, sequence: Timed) -> float:
        """Returns when the job of the sequence's next token must begin, or it misses its objective."""
        return self.latest(sequence) - self.times.prompt(self.left(sequence))

    def is_late(self, sequence: Timed, now: float) -> bool:
        """Returns whether a sequence that waits cannot be in time any more."""
        return now > self.begin_by(sequence)

    def drawn(self, sequence: Timed) -> None:
        """Notes that a job has drawn the sequence's next token, which it does not have yet."""
        now = self._clock.now()
        sequence.missed = now > self.latest(sequence)
        if sequence.first_at is None:
            sequence.first_at = now
