"""The unit's pool: one allocator, and each model's cache over it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvloom.kv.cache import ModelCache
from kvloom.kv.pages import BlockAllocator, Reclaimable
from kvloom.kv.prefix import Recency
from kvloom.kv.prefix_feed import PrefixFeed
from kvloom.types.geometry import I32, Geometry


class Pool:
    """The blocks that all models of a unit share; none has a part of its own."""

    def __init__(
        self,
        total_blocks: int,
        geometries: Mapping[str, Geometry],
        *,
        max_sequences: int,
        max_tokens: Mapping[str, int],
    ) -> None:
        self.lent = 0  # blocks that another unit has
        self.weights = 0  # blocks whose memory weights have
        self._recency = Recency()
        self._allocator = BlockAllocator(total_blocks, self._recency)
        self.caches = {
            name: ModelCache(
                name,
                geometry,
                self._allocator,
                self._recency,
                max_sequences=max_sequences,
                max_tokens=max_tokens[name],
            )
            for name, geometry in geometries.items()
        }

    @property
    def total(self) -> int:
        return self._allocator.total

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self._allocator.free

    @property
    def cached(self) -> int:
        """Blocks of cached pages that nobody uses: they give way when blocks are short."""
        return self._recency.blocks

    @property
    def feed(self) -> PrefixFeed:
        """Returns the feed that tells others what all models' prefix trees hold."""
        return self._recency.feed

    @property
    def recency(self) -> Recency:
        """Returns the order in which all models' cached pages give way."""
        return self._recency

    @property
    def available(self) -> int:
        """Blocks that can be had: free and cached ones, and those of weights that nobody uses."""
        return self._allocator.available

    def reclaim_from(self, idle: Reclaimable) -> None:
        """Counts blocks of weights that nobody uses among those that can be had. `idle` gives them back by
        `take_from_weights` when free and cached ones are not enough."""
        self._allocator.idle = idle

    def lend(self, count: int) -> I32:
        """Takes blocks that are another unit's for a while, and count as used. Raises OutOfBlocks, with none
        lent."""
        blocks = self._allocator.take(count)
        self.lent += count
        return blocks

    def take_back(self, blocks: I32) -> None:
        """Undoes `lend` for these blocks."""
        self._allocator.give(blocks)
        self.lent -= blocks.size

    @property
    def room(self) -> int:
        """Blocks that K and V may have: all but those whose memory weights have."""
        return self.total - self.weights

    def yield_to_weights(self, count: int) -> I32:
        """Takes blocks whose memory weights are to have. Raises OutOfBlocks, with none taken."""
        blocks = self._allocator.take(count)
        self.weights += count
        return blocks

    def take_from_weights(self, blocks: I32) -> None:
        """Undoes `yield_to_weights` for these blocks."""
        self._allocator.give(blocks)
        self.weights -= blocks.size

    def check(self) -> None:
        """Checks law 1, conservation. Raises AssertionError with the numbers if it does not hold."""
        used = self.lent + self.weights + sum(cache.used_blocks for cache in self.caches.values())
        assert self.free + used + self.cached == self.total, (
            f"free {self.free} + used {used} + cached {self.cached} != total {self.total}"
        )
        blocks: list[int] = []
        nodes = 0
        for cache in self.caches.values():
            pages, holders, tree = cache.pages, cache.holders(), cache.prefixes.holders()
            refs = {page: count for page, count in enumerate(pages.refs) if count}
            assert refs == holders, f"{cache.model}: refcounts {refs} != holders {dict(holders)}"
            marked = {page for page, cached in enumerate(pages.cached) if cached}
            assert marked == set(tree), f"{cache.model}: cached {marked} != in the tree {set(tree)}"
            counted = int(np.count_nonzero(pages.promises))
            assert (pages.promises <= np.array(pages.refs)).all(), (
                f"{cache.model}: more promises than holders"
            )
            assert counted == pages.promised, f"{cache.model}: {pages.promised} promised pages, not {counted}"
            idle = sum(pages.refs[page] == 1 for page in marked)
            assert idle == pages.idle, f"{cache.model}: {pages.idle} idle pages, not {idle}"
            blocks += pages.map[list(refs)].ravel().tolist()
            nodes += len(tree)
        assert len(set(blocks)) == len(blocks) == used + self.cached - self.lent - self.weights, (
            "a block has two pages, or none"
        )
        ordered = len(self._recency.nodes)
        assert nodes == ordered, f"{nodes} pages in trees, {ordered} in the order of use"
