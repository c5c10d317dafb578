"""Requests that are about to arrive, and the decode step that waits a little for one.

A step takes no newcomer once it has begun, and who arrives just then waits for all of it. So one that is due
within a part of a step is waited for, and is in that step instead of the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.reservations import Reservations
from kvloom.types.clock import Clock

LONGEST: Final = 0.5  # of a step, for which it waits
MOST: Final = 0.1  # seconds, for which it does, however long the step
SOON: Final = 0.7  # of the longest wait, within which a newcomer has to be due, or late
EVERY: Final = 8  # steps after a wait, until there may be another


@dataclass(frozen=True, slots=True)
class _Wait:
    """For those who are due from `since` to `by`, and itself until `until`, by the clock. step: seconds that
    one was to take."""

    since: float
    by: float
    until: float
    step: float


class Arrivals:
    """Those that have room reserved and have said when they come. A model whose steps wait loses `LONGEST` of
    `EVERY` steps at most, by the clock. No other loses anything: a step waits only where nobody else on the
    unit has a sequence, because its share of the compute might go to a long job of theirs meanwhile."""

    def __init__(self, queues: Mapping[str, ModelQueue], reservations: Reservations, clock: Clock) -> None:
        self._queues = queues
        self._reservations = reservations
        self._clock = clock
        self._waiting: set[str] = set()  # models
        self._last: dict[str, _Wait] = {}  # by model

    @property
    def due(self) -> float | None:
        """When `expire` has something to do."""
        return min((self._last[model].until for model in self._waiting), default=None)

    def expire(self) -> None:
        """Nobody waits for longer than was meant."""
        now = self._clock.now()
        self._waiting = {model for model in self._waiting if self._last[model].until > now}

    def waits(self, queue: ModelQueue) -> bool:
        """Whether the decode step of a model that could begin is to wait: while a newcomer is due, but until
        `due` at most."""
        model = queue.card.name
        coming = self._reservations.expected(model)
        wait = self._wait(queue) if coming else None  # mostly nobody is, and a step costs no more than that
        if wait and self._joins(queue) and any(wait.since <= at <= wait.by for at in coming):
            self._waiting.add(model)
            self._last[model] = wait
            return True
        self._waiting.discard(model)
        return False

    def _wait(self, queue: ModelQueue) -> _Wait | None:
        """The one under way, or what there may be from now on; None before it is known what a step takes, or
        soon after one."""
        last = self._last.get(queue.card.name)
        if queue.card.name in self._waiting:
            return last
        now, step = self._clock.now(), queue.pace.least
        if step == 0 or (last and now < last.until + EVERY * max(step, last.step)):
            return None
        longest = min(LONGEST * step, MOST)
        return _Wait(now - SOON * longest, now + SOON * longest, now + longest, step)

    def _joins(self, queue: ModelQueue) -> bool:
        """Whether a newcomer would be in the step, and the wait is no other model's."""
        others = (other for other in self._queues.values() if other is not queue)
        if any(other.waiting or other.running for other in others):
            return False
        return not queue.waiting and len(queue.running) < queue.max_running
