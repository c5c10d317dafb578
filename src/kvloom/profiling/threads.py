"""What the kernel knows of processes: who started them, and the CPU time of their threads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
NANOSECOND: Final = 1e-9


def descendants(pid: int) -> dict[int, str]:
    """Returns the processes that any thread of `pid` has started, and those that these have: their command
    lines by pid."""
    tasks = (PROC / str(pid) / "task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    found = {child: _command(child) for child in children}
    for child in children:
        found |= descendants(child)
    return found


def main_thread_seconds(pid: int) -> float:
    """CPU time of the thread that a process began with."""
    return _seconds(PROC / str(pid) / "task" / str(pid))


def all_threads_seconds(pid: int) -> float:
    """CPU time of the threads that a process has now."""
    return sum(_seconds(task) for task in (PROC / str(pid) / "task").iterdir())


def _seconds(task: Path) -> float:
    """By the scheduler's own count, where the kernel keeps it; else by its ticks."""
    try:
        return int((task / "schedstat").read_text().split()[0]) * NANOSECOND
    except FileNotFoundError:
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _command(pid: int) -> str:
    return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
