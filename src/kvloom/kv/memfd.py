"""Memory that other processes of the host may map (a memfd, Linux): its name tells what it is and whose."""

from __future__ import annotations

import os


def create(what: str) -> int:
    """A new descriptor of nothing yet, of this process alone; it is not inherited."""
    return os.memfd_create(_name(what, os.getpid()), os.MFD_CLOEXEC)


def link(what: str, pid: int) -> str:
    """Where /proc/PID/fd says that a descriptor of `what` leads, which process `pid` has made."""
    return f"/memfd:{_name(what, pid)} (deleted)"


def _name(what: str, pid: int) -> str:
    return f"kvloom-{what}-{pid}"
