"""What happened in a run, event by event."""

from __future__ import annotations

from kvloom.core.clock import Clock


class Journal:
    """A line an event: when (virtual seconds), what, who, and how it was. counts: by what. Lines are kept
    only where they are wanted, for they take longer to write than the events themselves."""

    def __init__(self, clock: Clock, *, kept: bool) -> None:
        self.lines: list[str] = []
        self.counts: dict[str, int] = {}
        self.kept = kept
        self._clock = clock

    def __call__(self, what: str, who: str, *how: object) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
        if self.kept:
            said = " ".join(filter(None, map(str, how)))
            self.lines.append(f"{self._clock.now():11.6f}  {what:<9} {who:<18} {said}".rstrip())
