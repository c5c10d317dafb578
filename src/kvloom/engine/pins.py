"""What callers ask of the prefix caches: keep this, drop that."""

from __future__ import annotations

from collections.abc import Mapping

from kvloom.core.errors import OutOfBlocks
from kvloom.core.verbs import Held, Prefix
from kvloom.engine.model_queue import ModelQueue


class Pins:
    """The verbs pin, unpin and evict, for bodies that have been checked. total: the pool's blocks."""

    def __init__(self, queues: Mapping[str, ModelQueue], total: int) -> None:
        self._queues = queues
        self._total = total
        self._longest = max(q.cache.geometry.blocks(q.card.context_length) for q in queues.values())

    def pin(self, body: Prefix) -> Held:
        """Raises OutOfBlocks where the longest request would find no room beside what is pinned."""
        prefixes = self._queues[body.model].cache.prefixes
        tokens = prefixes.pin(body.prompt)
        pinned = sum(queue.cache.prefixes.pinned_blocks for queue in self._queues.values())
        if self._total - pinned < self._longest:
            prefixes.unpin(body.prompt)
            raise OutOfBlocks(
                f"pin: {pinned} of {self._total} blocks would be pinned, and the longest request "
                f"needs {self._longest}; unpin others first"
            )
        return Held(tokens=tokens)

    def unpin(self, body: Prefix) -> Held:
        return Held(tokens=self._queues[body.model].cache.prefixes.unpin(body.prompt))

    def evict(self, body: Prefix) -> Held:
        return Held(tokens=self._queues[body.model].cache.prefixes.evict(body.prompt))
