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
    """A source of time: the machine's clock, or the virtual clock of a simulation."""

    def now(self) -> float:
        """Returns the seconds since some fixed moment, which never go back."""

    async def sleep(self, seconds: float) -> None: ...


class WallClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """Opens a task group that raises the error of its first task to fail instead of an ExceptionGroup."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def has_ended(process: int) -> bool:
    """Returns whether the process behind the pidfd `process` has ended."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def ending(code: int) -> str:
    """Says how a process ended. `code` is as `subprocess` gives it, negative if a signal ended the
    process."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
