"""How much of a unit's pool may be promised, to pins and to reservations."""

from __future__ import annotations

from collections.abc import Mapping

from kvloom.engine.model_queue import ModelQueue
from kvloom.types.errors import OutOfBlocks


class Promises:
    """One budget for both, because no preemption brings their blocks back: what is not promised must hold the
    longest request that any model of the unit lets in. So whoever is let in can be computed to its end.

    A pool that does not hold two of the longest requests has a budget smaller than one of them, and none at
    all where it holds just one; but a reservation may be as long as that. There reservations may go beyond
    the budget as long as each request that is here has room for the tokens it has by now. As requests grow,
    and others come, that may become too little. While it is, what went beyond is not renewed, so nobody waits
    for it longer than one lease: nor do two units whose sends wait for room that each has promised to the
    other's. Pins, which may last, never go beyond.
    """

    def __init__(self, queues: Mapping[str, ModelQueue], total: int) -> None:
        self._queues = queues
        self._total = total
        self.lent = 0  # blocks that another unit has
        self._longest = max(q.cache.geometry.blocks(q.card.context_length) for q in queues.values())
        self._small = total < 2 * self._longest

    @property
    def blocks(self) -> int:
        """Promised now, each block once."""
        return self.lent + sum(queue.cache.pages.promised_blocks for queue in self._queues.values())

    def within(self, more: int = 0) -> bool:
        """Whether what is promised, and `more` blocks, leave the longest request its room."""
        return self.blocks + more <= self._total - self._longest

    def in_the_way(self, more: int = 0) -> bool:
        """Whether a request that is here would have no room for the tokens it has."""
        return self._total - self.blocks - more < self._longest_here

    def reserve(self, more: int) -> bool:
        """Whether `more` blocks for a reservation go beyond the budget. Raises OutOfBlocks where they may
        not."""
        beyond = not self.within(more)
        if beyond and (not self._small or self.in_the_way(more)):
            raise self.refusal("prep_recv", more)
        return beyond

    def refusal(self, verb: str, more: int = 0) -> OutOfBlocks:
        return OutOfBlocks(
            f"{verb}: {self.blocks + more} of {self._total} blocks would be promised to pins and "
            f"reservations, and the longest request needs {self._longest}; end others first, or raise "
            "kv_memory"
        )

    @property
    def _longest_here(self) -> int:
        return max(queue.longest_here for queue in self._queues.values())
