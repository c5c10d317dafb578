"""Requests that are about to arrive, and the decode step that waits a little for one.

A step takes no newcomer once it has begun, and who arrives just then waits for all of it. So one that is due
within a part of a step is waited for, and is in that step instead of the next.
"""

from __future__ import annotations

from typing import Final

from kvloom.core.clock import Clock
from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.reservations import Reservations

SOON: Final = 0.35  # of a step, within which a newcomer has to be due, or late, to be waited for
LONGEST: Final = 0.5  # of a step, for which it is
EVERY: Final = 8  # jobs of the unit, in which one such wait may be


class Arrivals:
    """Those that have room reserved and have said when they come. A unit's jobs wait for `LONGEST` / `EVERY`
    of a step on average, at most."""

    def __init__(self, reservations: Reservations, clock: Clock) -> None:
        self._reservations = reservations
        self._clock = clock
        self._waiting: dict[str, tuple[str, float]] = {}  # by model: for which request, until when
        self._waited_at = -EVERY  # jobs that the unit had started

    @property
    def due(self) -> float | None:
        """When `expire` has something to do."""
        return min((until for _, until in self._waiting.values()), default=None)

    def expire(self) -> None:
        """Nobody waits for longer than was meant."""
        now = self._clock.now()
        self._waiting = {model: wait for model, wait in self._waiting.items() if wait[1] > now}

    def waits(self, queue: ModelQueue, jobs: int) -> bool:
        """Whether the decode step of a model that could begin is to wait: until the newcomer is here or gives
        up, or until `due`. jobs: that the unit has started."""
        model = queue.card.name
        waiting = self._waiting.get(model)
        if waiting is not None:
            if self._reservations.has(waiting[0]):
                return True
            del self._waiting[model]
            return False
        step = queue.pace.seconds
        if jobs < self._waited_at + EVERY or step == 0:
            return False
        now = self._clock.now()
        newcomer = self._reservations.expected(model, now - SOON * step, now + SOON * step)
        if newcomer is None:
            return False
        self._waiting[model] = newcomer, now + LONGEST * step
        self._waited_at = jobs
        return True
