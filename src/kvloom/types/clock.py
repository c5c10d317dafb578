"""The clock, tasks that fail together, and how a process has ended, for every layer."""

from __future__ import annotations

import asyncio
import select
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""

    async def sleep(self, seconds: float) -> None: ...


class WallClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises what its first task to fail has failed of, not a group of such."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def has_ended(process: int) -> bool:
    """process: its pidfd."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def ending(code: int) -> str:
    """code: as subprocess gives it, negative where a signal ended it."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
