"""The unit's pool: one allocator, and each model's cache over it."""

from __future__ import annotations

from collections.abc import Mapping

from kvloom.core.geometry import Geometry
from kvloom.kv.allocator import BlockAllocator
from kvloom.kv.cache import ModelCache


class Pool:
    """All models of a unit share `total_blocks` blocks; none has a part of its own."""

    def __init__(
        self,
        total_blocks: int,
        geometries: Mapping[str, Geometry],
        *,
        max_sequences: int,
        max_tokens: Mapping[str, int],
    ) -> None:
        self._allocator = BlockAllocator(total_blocks)
        self.caches = {
            name: ModelCache(
                name, geometry, self._allocator, max_sequences=max_sequences, max_tokens=max_tokens[name]
            )
            for name, geometry in geometries.items()
        }

    @property
    def total(self) -> int:
        return self._allocator.total

    @property
    def free(self) -> int:
        return self._allocator.free

    def check(self) -> None:
        """Law 1, conservation. Raises AssertionError with the numbers where it does not hold."""
        held = sum(cache.used_blocks for cache in self.caches.values())
        assert self.free + held == self.total, f"free {self.free} + held {held} != total {self.total}"
        for cache in self.caches.values():
            holders: dict[int, int] = {}
            for sequence in cache.sequences:
                for page in cache.page_list(sequence):
                    holders[page] = holders.get(page, 0) + 1
            for page in cache.copying:
                holders[page] = holders.get(page, 0) + 1
            refs = {int(p): int(cache.pages.refs[p]) for p in cache.pages.refs.nonzero()[0]}
            assert refs == holders, f"{cache.model}: refcounts {refs} != holders {holders}"
            blocks = [int(b) for page in refs for b in cache.pages.map[page].ravel()]
            assert len(set(blocks)) == len(blocks) == cache.used_blocks, (
                f"{cache.model}: a block has two pages"
            )
