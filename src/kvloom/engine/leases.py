"""What ends where nobody renews it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvloom.types.clock import Clock


class Leased(Protocol):
    @property
    def due(self) -> float | None:
        """When the next of its leases runs out, by the clock; None where it has none."""

    def expire(self) -> None:
        """Give up whose lease has run out."""


class Leases:
    """Of all parts of an engine, by one clock."""

    def __init__(self, parts: Sequence[Leased], clock: Clock) -> None:
        self._parts = parts
        self._clock = clock

    @property
    def left(self) -> float | None:
        """Seconds until one runs out, 0 where it has; None where there is none."""
        due = min((due for part in self._parts if (due := part.due) is not None), default=None)
        return None if due is None else max(0.0, due - self._clock.now())

    def expire(self) -> None:
        for part in self._parts:
            part.expire()
