"""How late an event loop is: what the host's other work, under one GIL, costs who shares it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np

_EVERY: Final = 0.01  # seconds


class Lag:
    """Of a loop while it is `watched`: seconds by which each of many timers was late."""

    def __init__(self) -> None:
        self.late: list[float] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """On the loop's own thread."""
        loop = asyncio.get_running_loop()

        def again() -> asyncio.TimerHandle:
            due = loop.time() + _EVERY
            return loop.call_at(due, look, due)

        def look(due: float) -> None:
            self.late.append(loop.time() - due)
            timers[:] = [again()]

        timers = [again()]
        try:
            yield
        finally:
            timers[0].cancel()

    def told(self) -> str:
        if not self.late:
            return "the loop's timers never ran"
        typical, worst = (float(np.percentile(self.late, part)) * 1e3 for part in (50, 99))
        return f"timers late by {typical:.1f} ms (median), {worst:.1f} ms (P99)"
