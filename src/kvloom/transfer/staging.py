"""The staging buffer of a unit that speaks NIXL: scattered blocks are gathered there, cross the network as
one descriptor, and are scattered at the other end (block fusion: Llumnix, section 5)."""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvloom.types.errors import BadRequest
from kvloom.types.geometry import I64, AnyArray

WINDOWS: Final = 4  # transfers that are staged at the same time, at each end
HALVES: Final = 2  # of a window: one is filled while the other one is emptied
MOST_SPANS: Final = 256  # of what is staged at once; the message about it has 16 bytes for each
SINK: Final = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class StagingCosts:
    """Holds what staging saves and costs, as measured between two units."""

    descriptor: float
    """Seconds that one more descriptor of a write takes."""
    copy: float
    """Seconds in which this unit gathers a byte; the peer is taken to scatter one in as many."""

    def pays(self, spans: int, size: int) -> bool:
        """Returns whether `size` bytes in so many spans go faster through staging buffers than each by a
        descriptor of its own."""
        return spans * self.descriptor > self.descriptor + 2 * size * self.copy


NEVER: Final = StagingCosts(0.0, 1.0)
ALWAYS: Final = StagingCosts(1.0, 0.0)


class Staging:
    """Memory beside a unit's arena: windows into which peers write what is to be scattered here, windows in
    which this unit gathers, and a sink into which anybody writes who measures, and which nobody reads."""

    def __init__(self, arena: AnyArray, half: int) -> None:
        """arena: all bytes of the unit's arena. half: bytes of half a window."""
        self._arena = arena
        self.half = half
        self._windows = WINDOWS * HALVES * half
        self.size = 2 * self._windows + SINK
        self.memory: AnyArray = np.frombuffer(mmap.mmap(-1, self.size), np.uint8)
        """[size]; its pages are taken from the system when they are first written."""

    @property
    def address(self) -> int:
        return self.memory.ctypes.data

    def inward(self, window: int, half: int) -> int:
        """Returns where half a window begins that a peer writes."""
        return (window * HALVES + half) * self.half

    def outward(self, window: int, half: int) -> int:
        """Returns where half a window begins in which this unit gathers."""
        return self._windows + self.inward(window, half)

    @property
    def sink(self) -> int:
        """Returns where the sink begins."""
        return sink_of(self.half)

    def gather(self, window: int, half: int, starts: I64, sizes: I64) -> None:
        """Copies these spans of the arena, which half a window holds, one behind the other."""
        at = self.outward(window, half)
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            self.memory[at : at + size] = self._arena[start : start + size]
            at += size

    def scatter(self, window: int, half: int, starts: I64, sizes: I64) -> None:
        """Copies what a peer has written into these spans of the arena. Raises BadRequest if half a window
        does not hold them."""
        if not 0 <= half < HALVES or int(sizes.sum()) > self.half:
            raise BadRequest("what was staged is no half of a window")
        at = self.inward(window, half)
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            self._arena[start : start + size] = self.memory[at : at + size]
            at += size

    def copy_seconds(self, block: int) -> float:
        """Returns the seconds in which a byte is gathered, by blocks of so many bytes of the arena, the
        quickest of three times."""
        count = max(1, min(len(self._arena), self.half) // block)
        starts = np.arange(count, dtype=np.int64)[::-1] * block
        sizes = np.full(count, min(block, self.half), np.int64)
        least = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            self._gather_for_nothing(starts, sizes)
            least = min(least, time.perf_counter() - began)
        return least / int(sizes.sum())

    def _gather_for_nothing(self, starts: I64, sizes: I64) -> None:
        at, last = self.sink, self.sink + SINK
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            if at + size > last:
                at = self.sink
            self.memory[at : at + size] = self._arena[start : start + size]
            at += size


def sink_of(half: int) -> int:
    """Returns where the sink begins in a staging buffer with such halves of windows."""
    return 2 * WINDOWS * HALVES * half


def free_window(taken: set[int]) -> int:
    """Returns a window that is not taken; -1 if all are."""
    return next((window for window in range(WINDOWS) if window not in taken), -1)
