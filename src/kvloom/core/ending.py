"""Whether a process has ended, and how, in words."""

from __future__ import annotations

import select
import signal


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
