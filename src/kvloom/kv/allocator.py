"""The pool's blocks: free or held, nothing else."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvloom.core.arrays import I32
from kvloom.core.errors import OutOfBlocks


class Reclaimable(Protocol):
    """Held blocks that are given back when they are wanted."""

    @property
    def blocks(self) -> int:
        """How many there are."""

    def reclaim(self, count: int) -> None:
        """Give back at least `count` of them."""


class BlockAllocator:
    """A stack of free block ids. Freed blocks are taken again first, while they are warm."""

    def __init__(self, total: int, cached: Reclaimable) -> None:
        self.total = total
        self._cached = cached
        self._stack: I32 = np.arange(total - 1, -1, -1, dtype=np.int32)
        self._free = total
        self._held = np.zeros(total, dtype=np.bool_)
        self._place = np.empty(total, dtype=np.int32)  # in the list that is being given

    @property
    def free(self) -> int:
        return self._free

    @property
    def available(self) -> int:
        """Blocks that `take` can give: free ones, and cached ones that nobody uses."""
        return self._free + self._cached.blocks

    def take(self, count: int) -> I32:
        """`count` block ids, for which cached pages give way. Raises OutOfBlocks, with nothing taken or
        reclaimed, where fewer are available."""
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks asked for, {self.available} of {self.total} available")
        if count > self._free:
            self._cached.reclaim(count - self._free)
        blocks = np.sort(self._stack[self._free - count : self._free])  # runs in order read faster
        self._free -= count
        self._held[blocks] = True
        return blocks

    def give(self, blocks: I32) -> None:
        """Return held blocks. Raises ValueError where one is free already, and returns none."""
        places = np.arange(blocks.size, dtype=np.int32)
        self._place[blocks] = places
        if not self._held[blocks].all() or not np.array_equal(self._place[blocks], places):
            raise ValueError("a block was freed twice")
        self._held[blocks] = False
        self._stack[self._free : self._free + blocks.size] = blocks
        self._free += blocks.size
