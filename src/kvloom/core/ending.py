"""How a process has ended, in words."""

from __future__ import annotations

import signal


def ending(code: int) -> str:
    """code: as subprocess gives it, negative where a signal ended it."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
