"""How far a job of several steps has come, as its own thread and the engine's see it."""

from __future__ import annotations

import threading


class Progress:
    """begun: steps that the device has been asked for."""

    def __init__(self, steps: int) -> None:
        self.begun = 1
        self._most = steps
        self._lock = threading.Lock()

    def goes_on(self) -> bool:
        """Whether there is to be another step, which has begun then."""
        with self._lock:
            more = self.begun < self._most
            self.begun += more
            return more

    def cut(self) -> None:
        """No other step begins."""
        with self._lock:
            self._most = self.begun
