"""The memory of this process: what it could still take without another's or its own death, what it keeps of
what it frees, and the pages in its page table."""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

MEMINFO: Final = Path("/proc/meminfo")
CGROUP: Final = Path("/sys/fs/cgroup")
POPULATE_READ: Final = 22  # MADV_POPULATE_READ, since Linux 5.14: sixteen times fewer faults than by writing
POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, of the same kernel
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_KEPT: Final = 256 << 20  # bytes at most that jobs have freed
_ENTERED: Final = 16 << 20  # bytes whose pages are entered at a time


def available_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Returns the bytes that the kernel says are available, or fewer if a container's own limit leaves fewer.
    Pages of files count as available, because the kernel drops them for whoever needs memory."""
    told = _table(meminfo)
    free = 1024 * told.get("MemAvailable", told.get("MemFree", 1 << 52))
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        files = _table(cgroup / "memory.stat")
    except OSError:
        return free
    if not limit.isdigit():
        return free
    dropped = files.get("active_file", 0) + files.get("inactive_file", 0)
    return min(free, max(int(limit) - used + dropped, 0))


def return_free_memory() -> None:
    """Returns to the kernel what this process has freed, as far as the C library can: loading leaves holes
    between what stays. Other libraries than glibc do it by themselves, or not at all."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Lets the C library keep what is freed from now on, up to `_KEPT`, instead of returning it to the
    kernel, with one heap for all threads that begin later. Otherwise each job's temporaries come as new
    pages, and to clear and map these took a sixth of a forward of a small encoder. Only glibc is told."""
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        for most in (_KEPT, 32 << 20):  # older ones refuse the first
            if library.mallopt(_M_MMAP_THRESHOLD, most):
                break
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT)
        library.mallopt(_M_ARENA_MAX, 1)


def whole_pages(begin: int, end: int) -> tuple[int, int]:
    """Returns the edges of the whole pages of memory between two addresses; there is none if the first edge
    is not below the second."""
    return -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE


def advise(address: int, size: int, advice: int) -> None:
    """Calls madvise for whole pages of this process. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def enter_pages(begin: int, size: int) -> None:
    """Enters the pages of this much memory at an address into the process's page table, which takes about a
    second for 4 GiB. Otherwise the first job that writes to a page waits for the kernel to do it, and
    prefills of a 100M model took a third longer until each page of the pool had been written to once. A
    kernel that cannot, as those before 5.14, still does it as each page is touched."""
    low, high = whole_pages(begin, begin + size)
    # Threads would do it sooner, but the C library would give their heaps to the threads of jobs.
    with suppress(OSError):
        for at in range(low, high, _ENTERED):
            advise(at, min(_ENTERED, high - at), POPULATE_WRITE)


def _table(file: Path) -> dict[str, int]:
    """Returns a kernel's table of one name and one number a line."""
    lines = (line.replace(":", " ").split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
