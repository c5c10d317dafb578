"""A model's pages: which blocks each is made of, and how many hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from kvloom.types.errors import OutOfBlocks
from kvloom.types.geometry import I32, I64, Geometry


class Reclaimable(Protocol):
    """Held blocks that are given back when they are wanted."""

    blocks: int
    """The number of such blocks. The page tables count them."""

    def reclaim(self, count: int) -> None:
        """Gives back at least `count` of them."""


class NothingReclaimable:
    """Satisfies `Reclaimable`, with no blocks."""

    blocks = 0

    def reclaim(self, count: int) -> None:
        """Gives back nothing."""


class BlockAllocator:
    """A stack of free block ids. Freed blocks are taken again first, while they are warm."""

    def __init__(self, total: int, cached: Reclaimable) -> None:
        self.total = total
        self.cached = cached
        self.idle: Reclaimable = NothingReclaimable()
        """Blocks of weights that nobody uses; they are given back when cached ones are not enough."""
        self._stack: I32 = np.arange(total - 1, -1, -1, dtype=np.int32)
        self._free = total
        self._held = np.zeros(total, dtype=np.bool_)

    @property
    def free(self) -> int:
        return self._free

    @property
    def available(self) -> int:
        """Blocks that `take` can give: free ones, and those of cached pages and of weights that nobody
        uses."""
        return self._free + self.cached.blocks + self.idle.blocks

    def take(self, count: int) -> I32:
        """Takes `count` block ids, for which cached pages give way. Raises OutOfBlocks, with nothing taken or
        reclaimed, if fewer are available."""
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks asked for, {self.available} of {self.total} available")
        if count > self._free:
            self.cached.reclaim(min(count - self._free, self.cached.blocks))
        if count > self._free:
            self.idle.reclaim(count - self._free)
        # Runs in order read faster. Pages that were given back are such runs, which a stable sort merges.
        blocks = np.sort(self._stack[self._free - count : self._free], kind="stable")
        self._free -= count
        self._held[blocks.astype(np.intp)] = True
        return blocks

    def give(self, blocks: I32) -> None:
        """Takes back held blocks. Raises ValueError, with none taken back, if one is free already."""
        ordered, places = np.sort(blocks, kind="stable"), blocks.astype(np.intp)
        if (ordered[1:] == ordered[:-1]).any() or not self._held[places].all():
            raise ValueError("a block was freed twice")
        self._held[places] = False
        self._stack[self._free : self._free + blocks.size] = blocks
        self._free += blocks.size


class PageTable:
    """The pages of one model: `map[page, layer, head]` is a block. It is sized once for the whole pool, so
    that running jobs never see it move; a page's row is constant while anyone holds the page."""

    def __init__(self, geometry: Geometry, allocator: BlockAllocator) -> None:
        self.geometry = geometry
        self._allocator = allocator
        capacity = allocator.total // geometry.blocks_per_page
        self.map: I32 = np.zeros((capacity, geometry.layers, geometry.kv_heads), dtype=np.int32)
        self.refs = [0] * capacity
        """[pages] holders."""
        self.cached = bytearray(capacity)
        """[pages] whether the prefix tree is one of them, 1 or 0."""
        self.versions: I64 = np.zeros(capacity, dtype=np.int64)
        """[pages] another number after each change of a page's row."""
        self.promises = np.zeros(capacity, dtype=np.int32)
        """[pages] pins and reservations among the holders, from whom no preemption takes the page."""
        self._ids = list(range(capacity - 1, -1, -1))
        self.held = 0  # pages with a holder
        self.idle = 0  # pages that the tree alone holds, which may be reclaimed
        self.promised = 0  # pages with a promise
        self.on_change: Callable[[], None] = _nobody_asks
        """Called when holders have changed."""

    @property
    def rank_blocks(self) -> int:
        """The blocks of the pool, of which each rank of the unit has as many."""
        return self._allocator.total

    @property
    def used_blocks(self) -> int:
        return (self.held - self.idle) * self.geometry.blocks_per_page

    @property
    def idle_blocks(self) -> int:
        return self.idle * self.geometry.blocks_per_page

    @property
    def promised_blocks(self) -> int:
        return self.promised * self.geometry.blocks_per_page

    def promised_of(self, pages: Sequence[int]) -> int:
        """Returns the blocks of those of these pages that have a promise."""
        return int(np.count_nonzero(self.promises[pages])) * self.geometry.blocks_per_page

    @property
    def available(self) -> int:
        """Pages that `allocate` can give."""
        return self._allocator.available // self.geometry.blocks_per_page

    def allocate(self, count: int) -> list[int]:
        """Returns `count` new pages, each with one holder. Raises OutOfBlocks and takes nothing."""
        if count == 0:
            return []
        shape = (count, self.geometry.layers, self.geometry.kv_heads)
        blocks = self._allocator.take(count * self.geometry.blocks_per_page)
        pages = [self._ids.pop() for _ in range(count)]
        places = np.array(pages)
        self.map[places] = blocks.reshape(shape)
        self.versions[places] += 1  # after the row: who has seen the number, sees the row
        for page in pages:
            self.refs[page] = 1
        self.held += count
        self.on_change()
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds a holder to each page."""
        self.on_change()
        for page in pages:
            if self.refs[page] < 1:
                raise ValueError(f"page {page} is free and cannot be shared")
            if self.cached[page] and self.refs[page] == 1:
                self._count_idle(-1)
            self.refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes a holder from each page; pages without one give their blocks back."""
        self.on_change()
        refs, cached, gone = self.refs, self.cached, list[int]()
        for page in pages:
            left = refs[page] - 1
            if left < cached[page]:
                raise ValueError(f"page {page} was released twice")
            refs[page] = left
            if left == 0:
                gone.append(page)
            elif left == cached[page]:
                self._count_idle(1)
        if gone:
            self._allocator.give(self.map[gone].ravel())
            self._ids.extend(gone)
            self.held -= len(gone)

    def cache(self, page: int) -> None:
        """Makes the tree a holder of a page that somebody holds."""
        if self.cached[page]:
            raise ValueError(f"page {page} is cached already")
        self.retain([page])
        self.cached[page] = 1

    def uncache(self, pages: Sequence[int]) -> None:
        """Says of each page that the tree is none of its holders any more; `release` them next."""
        for page in pages:
            if not self.cached[page]:
                raise ValueError(f"page {page} is not cached")
            if self.refs[page] == 1:
                self._count_idle(-1)
            self.cached[page] = 0

    def promise(self, pages: Iterable[int]) -> None:
        """Promises these pages to a holder, whoever else wants them, until `unpromise`."""
        for page in pages:
            if self.promises[page] == self.refs[page]:
                raise ValueError(f"page {page} has {self.refs[page]} holders, and as many promises")
            self.promised += self.promises[page] == 0
            self.promises[page] += 1

    def unpromise(self, pages: Iterable[int]) -> None:
        """Undoes `promise` for these pages, before their holder lets go of them."""
        for page in pages:
            if self.promises[page] < 1:
                raise ValueError(f"page {page} is promised to nobody")
            self.promises[page] -= 1
            self.promised -= self.promises[page] == 0

    def _count_idle(self, more: int) -> None:
        self.idle += more
        self._allocator.cached.blocks += more * self.geometry.blocks_per_page


def _nobody_asks() -> None:
    """Does nothing: nobody wants to know that something has changed."""
