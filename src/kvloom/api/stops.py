"""Stop strings over streamed text: a stop string is never shown, and nothing waits that cannot become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Feed text in any pieces: what comes out is the text before the first stop string, the same for
    every way to cut it up."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """What can be shown now. After a hit: nothing any more."""
        if not self._stops:
            return text
        if self.hit is not None:
            return ""
        held = self._held + text
        found = [(at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            end, self.hit = min(found, key=lambda one: (one[0] + len(one[1]), one[0]))
            self._held = ""
            return held[:end]
        keep = self._border(held)
        self._held = held[keep:]
        return held[:keep]

    def end(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _border(self, text: str) -> int:
        """Where the longest tail begins that could still become a stop string."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[at:]
            if any(stop.startswith(tail) for stop in self._stops):
                return at
        return len(text)
