"""What this machine has to give: cores and memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Machine:
    """cores: those this process may use. memory: bytes that an arena may take now."""

    cores: int
    memory: int

    @classmethod
    def here(cls) -> Machine:
        return cls(cores=len(os.sched_getaffinity(0)), memory=_free_memory())


def _free_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, _free_cgroup_memory())
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _free_cgroup_memory() -> int:
    """A container's own limit, less what it uses already."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = (CGROUP / "memory.current").read_text().strip()
    except OSError:
        return 1 << 62
    return max(int(limit) - int(used), 0) if limit.isdigit() else 1 << 62
