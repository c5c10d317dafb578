"""What the kernel knows of a process: its children, memory and CPU time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """MiB. rss: all resident pages, pss: shared ones split among who shares them. Of rss, arena: those of
    kvloom's KV arena; files: those of checkpoint files that are mapped."""

    rss: float
    pss: float
    arena: float
    files: float


def descendants(pid: int) -> list[int]:
    """Returns the processes that any thread of `pid` has started, and those that these have."""
    tasks = (PROC / str(pid) / "task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [found for child in children for found in (child, *descendants(child))]


def command_line(pid: int) -> str:
    return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")


def cpu_seconds(pid: int) -> float:
    """User and system time of all its threads."""
    fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_memory(pid: int) -> float:
    """Returns the most MiB that were ever resident."""
    lines = (PROC / str(pid) / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024 / _MIB


def pss(pid: int) -> float:
    """Returns the MiB of a process, with shared pages split among who shares them."""
    lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / _MIB


def memory(pid: int) -> Memory:
    found = dict.fromkeys(("rss", "pss", "arena", "files"), 0)
    mapping = ""
    for line in (PROC / str(pid) / "smaps").read_text("utf-8", "replace").splitlines():
        key, _, rest = line.partition(":")
        if key == "Pss":
            found["pss"] += int(rest.split()[0])
        elif key == "Rss":
            kib = int(rest.split()[0])
            found["rss"] += kib
            found["arena"] += kib if "kvloom-arena" in mapping else 0
            found["files"] += kib if ".safetensors" in mapping else 0
        elif "-" in key.split(" ")[0]:
            mapping = line
    return Memory(**{name: 1024 * kib / _MIB for name, kib in found.items()})
