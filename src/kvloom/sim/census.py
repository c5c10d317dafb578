"""How many of a fleet's units have a process, over the time."""

from __future__ import annotations

from kvloom.core.clock import Clock


class Census:
    """least, most: that there have been; those of the beginning come all at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = self._since = clock.now()
        self._count = 0
        self._seconds = 0.0  # of all units together, up to `since`
        self._least: int | None = None
        self._most = 0

    @property
    def least(self) -> int:
        return self._count if self._least is None else min(self._least, self._count)

    @property
    def most(self) -> int:
        return max(self._most, self._count)

    @property
    def mean(self) -> float:
        """Up to now."""
        self._pass()
        seconds = self._since - self._began
        return self._seconds / seconds if seconds > 0 else float(self._count)

    def more(self) -> None:
        self._change(1)

    def less(self) -> None:
        self._change(-1)

    def _change(self, by: int) -> None:
        self._pass()
        self._count += by

    def _pass(self) -> None:
        """What there is has been there up to now; what lasted no time at all does not count."""
        now = self._clock.now()
        if now > self._since:
            self._seconds += self._count * (now - self._since)
            self._since = now
            self._least = self.least
            self._most = self.most
