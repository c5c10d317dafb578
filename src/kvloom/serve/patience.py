"""How long a process that dies or hangs is waited for; the config's `patience` is a request's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """In seconds. Before a start: `first`, doubled with each death up to `most`, `first` again after a life
    of `healthy`. A process that gives no answer to `misses` questions in a row hangs; it is asked every
    `check` seconds and has `answer` for each."""

    first: float = 0.5
    most: float = 30.0
    healthy: float = 60.0
    check: float = 5.0
    answer: float = 10.0
    misses: int = 3

    def pause(self, last: float, lived: float) -> float:
        """Before the next start. last: the pause before the life that has ended, 0 for none."""
        return self.first if lived >= self.healthy else min(max(self.first, 2 * last), self.most)
