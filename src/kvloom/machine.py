"""What this machine has to give: cores, memory and GPUs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Machine:
    """cores: those this process may use. memory: bytes that an arena may take now. gpus: NVIDIA's, that CUDA
    would show to this process."""

    cores: int
    memory: int
    gpus: int = 0

    @classmethod
    def here(cls) -> Machine:
        return cls(cores=len(os.sched_getaffinity(0)), memory=_free_memory(), gpus=_gpus())


def _gpus() -> int:
    """By their device files, without a driver's help: most machines have none."""
    files = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(files) if shown is None else min(len(files), len([part for part in shown.split(",") if part]))


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
