"""Memory that other processes of the host may map (a memfd, Linux): its name tells what it is and whose."""

from __future__ import annotations

import fcntl
import os


def create(what: str) -> int:
    """A new descriptor of nothing yet, of this process alone; it is not inherited. `seal` it once it has its
    size."""
    return os.memfd_create(_name(what, os.getpid()), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal(fd: int) -> None:
    """Its size is what it is, whoever else opens it: a peer that made it smaller would end each process that
    touches what is gone."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def link(what: str, pid: int) -> str:
    """Where /proc/PID/fd says that a descriptor of `what` leads, which process `pid` has made."""
    return f"/memfd:{_name(what, pid)} (deleted)"


def _name(what: str, pid: int) -> str:
    return f"kvloom-{what}-{pid}"
