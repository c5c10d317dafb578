"""What happened in a run, event by event."""

from __future__ import annotations

from collections import Counter

from kvloom.core.clock import Clock


class Journal:
    """A line an event: when (virtual seconds), what, who, and how it was. Lines are kept only where they are
    wanted, for they take longer to write than the events themselves. counts: of what is worth counting."""

    def __init__(self, clock: Clock, *, kept: bool) -> None:
        self.lines: list[str] = []
        self.counts: Counter[str] = Counter()
        self.kept = kept
        self._clock = clock

    def __call__(self, what: str, who: str, *how: object) -> None:
        if self.kept:
            said = " ".join(filter(None, map(str, how)))
            self.lines.append(f"{self._clock.now():11.6f}  {what:<8} {who:<10} {said}".rstrip())

    def count(self, what: str) -> None:
        self.counts[what] += 1
