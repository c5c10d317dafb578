"""What a process keeps of the memory that it frees."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_PAGES = """
import ctypes, resource, threading
from kvloom.kv.memory import keep_freed_memory
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
size = 64 << 20

def take():
    place = library.malloc(size)
    ctypes.memset(place, 1, size)
    library.free(place)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed_memory()
take()
before = faults()
for _ in range(3):
    take()
thread = threading.Thread(target=take)
thread.start()
thread.join()
print((faults() - before) * resource.getpagesize() / size)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries keep what they like")
def test_memory_that_was_freed_is_taken_again_without_new_pages() -> None:
    """Four more blocks of one size, the last one on another thread, take no new pages to speak of."""
    assert _told(_PAGES) < 0.1


_ARENA = """
import resource
import sys
from kvloom.kv.arena import Arena
arena = Arena(64, 1 << 20, committed=sys.argv[1] == "committed")
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
arena.bytes.fill_(1)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / (64 << 20))
"""


def test_the_pages_of_a_committed_arena_are_entered_before_a_job_writes_to_them() -> None:
    """The first write to all of a committed arena faults at hardly any page. That to an arena which gets
    memory only as it is written faults at each page, or at each huge one."""
    committed, later = _told(_ARENA, "committed"), _told(_ARENA, "later")
    assert later > 0.0
    assert committed <= later / 10


def _told(program: str, *arguments: str) -> float:
    """Returns the number that a program prints in a process of its own."""
    command = [sys.executable, "-c", program, *arguments]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
