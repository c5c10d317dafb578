"""Leases: the times until which a host's processes may serve.

A fleet's controller gives each host a lease, again and again. A host that is cut off hears of no other one,
and its engines end when theirs is over; the controller starts none of their units elsewhere before. So no
unit has two processes that serve, whichever side of a broken network asks. The controller counts from when
it gave the lease, and the host from when it had asked for it, which was earlier.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

MARGIN_SECONDS: Final = 1.0  # by which who gives a lease takes it to hold longer than it does
LOOK_SECONDS: Final = 0.5  # The event loop's clock stands still while a host is suspended.


def leased_time() -> float:
    """Returns the seconds since the host was booted, those in which it was suspended too. All processes of
    the host agree on it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def count_as_running(file: Path) -> int:
    """Lets this process count among those that the host's keeper has started, until it ends, whoever else
    lives by then. Returns a descriptor, which is to be kept open."""
    held = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    fcntl.flock(held, fcntl.LOCK_SH)
    return held


def wait_until_none_runs(file: Path) -> None:
    """Waits until all processes that count as running have ended. Those of a killed keeper may need some
    seconds, and the next keeper must not say before that they are gone."""
    held = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
    finally:
        os.close(held)


class HeldLease:
    """The lease of one process."""

    def __init__(self, until: float, now: Callable[[], float] = leased_time) -> None:
        self._until = until
        self._now = now

    def renew(self, until: float) -> None:
        """Takes another lease in. An older one that comes late changes nothing."""
        self._until = max(self._until, until)

    async def over(self) -> None:
        """Waits until the lease is over."""
        while (left := self._until - self._now()) > 0:  # noqa: ASYNC110 -- nothing tells when it is over
            await asyncio.sleep(min(left, LOOK_SECONDS))
