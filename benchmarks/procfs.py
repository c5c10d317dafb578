"""What the kernel knows of a process: its children, memory and CPU time."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PROC = Path("/proc")
_MIB = 1 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")
_FLAGS, _OF_FILE = 61, 5  # of an entry in pagemap: present, not swapped, of a file or of shared memory


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


def resident_memory(pid: int) -> float:
    """Returns the MiB that are resident now."""
    lines = (PROC / str(pid) / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024 / _MIB


def shares(pids: Iterable[int]) -> dict[int, float]:
    """Returns the MiB of each of these processes, with the pages that several of them share split among
    them. Unlike Pss, it is the same whoever else on the host has the same files mapped."""
    pages = {pid: _file_pages(pid) for pid in pids}
    mapped = Counter(page for found in pages.values() for page in found)
    of_files = {pid: _PAGE * sum(1 / mapped[page] for page in found) for pid, found in pages.items()}
    return {pid: (_anonymous(pid) + of_files[pid]) / _MIB for pid in pages}


def _anonymous(pid: int) -> int:
    """Returns the bytes that are no file's. Processes share those only with forks."""
    lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:")) * 1024


def _file_pages(pid: int) -> set[tuple[str, str, int]]:
    """Returns the pages of files and of shared memory that a process has resident, each as the file's device,
    its inode and the page's number."""
    found = set[tuple[str, str, int]]()
    with (PROC / str(pid) / "pagemap").open("rb") as pagemap:
        for line in (PROC / str(pid) / "maps").read_text("utf-8", "replace").splitlines():
            addresses, _, offset, device, inode, *_ = line.split()
            if inode == "0":
                continue
            first, end = (int(address, 16) // _PAGE for address in addresses.split("-"))
            pagemap.seek(8 * first)
            entries = np.frombuffer(pagemap.read(8 * (end - first)), np.uint64)
            resident = np.flatnonzero(entries >> np.uint64(_FLAGS) == _OF_FILE) + int(offset, 16) // _PAGE
            found.update((device, inode, page) for page in resident.tolist())
    return found


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
