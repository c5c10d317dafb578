"""The leases of an engine: their clock, the budget of promised blocks, and the pins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Protocol

import numpy as np

from kvloom.engine.model_queue import ModelQueue
from kvloom.kv.prefix import PinnedPath, PrefixTree
from kvloom.types.clock import Clock
from kvloom.types.errors import OutOfBlocks, QueueFull
from kvloom.types.verbs import Pin, Pinned

MOST_PINS: Final = 4096  # of one unit
TENANT_PART: Final = 0.5  # of what may be promised, for the pins of one tenant


class Leased(Protocol):
    """A part of an engine that keeps something for as long as somebody renews it."""

    @property
    def due(self) -> float | None:
        """When the next of its leases runs out, by the clock; None if it has none."""

    def expire(self) -> None:
        """Gives up everything whose lease has run out."""


class Leases:
    """Tracks when the next lease ends in any part of an engine."""

    def __init__(self, parts: Sequence[Leased], clock: Clock) -> None:
        self._parts = parts
        self._clock = clock

    @property
    def left(self) -> float | None:
        """Seconds until a lease runs out, 0 if one has; None if there is none."""
        due = min((due for part in self._parts if (due := part.due) is not None), default=None)
        return None if due is None else max(0.0, due - self._clock.now())

    def expire(self) -> None:
        """Gives up everything whose lease has run out."""
        for part in self._parts:
            part.expire()


class Promises:
    """One budget for pins and reservations, because no preemption brings their blocks back: what is not
    promised must hold the longest request that any model of the unit lets in. So each request that is let in
    can be computed to its end.

    A pool that does not hold two of the longest requests has a budget smaller than one of them, and none at
    all if it holds just one; but a reservation may be as long as that. In such a pool reservations may go
    beyond the budget as long as each request that is here has room for the tokens it has by now. As requests
    grow, and others come, that may become too little. While it is too little, reservations that went beyond
    the budget are not renewed, so nobody waits for them longer than one lease. Neither do two units that each
    wait for room at the other. Pins, which may last, never go beyond.
    """

    def __init__(self, queues: Mapping[str, ModelQueue], total: int) -> None:
        self._queues = queues
        self._total = total
        self.lent = 0
        """Blocks that another unit has."""
        self._longest = max(q.cache.geometry.blocks(q.card.context_length) for q in queues.values())
        self._small = total < 2 * self._longest

    @property
    def blocks(self) -> int:
        """Blocks that are promised now, each counted once."""
        return self.lent + sum(queue.cache.pages.promised_blocks for queue in self._queues.values())

    def within(self, more: int = 0) -> bool:
        """Returns whether what is promised, and `more` blocks, leave the longest request its room."""
        return self.blocks + more <= self._total - self._longest

    @property
    def of_a_tenant(self) -> int:
        """Blocks that the pins of one tenant may keep, each pin counted by itself."""
        return int(max(0, self._total - self._longest) * TENANT_PART)

    def in_the_way(self, more: int = 0) -> bool:
        """Returns whether a request that is here would have no room for the tokens it has."""
        return self._total - self.blocks - more < self._longest_here

    def reserve(self, more: int) -> bool:
        """Returns whether `more` blocks for a reservation go beyond the budget. Raises OutOfBlocks if they
        may not."""
        beyond = not self.within(more)
        if beyond and (not self._small or self.in_the_way(more)):
            raise self.refusal("prep_recv", more)
        return beyond

    def refusal(self, verb: str, more: int = 0) -> OutOfBlocks:
        """Returns the error that says why `more` blocks may not be promised."""
        return OutOfBlocks(
            f"{verb}: {self.blocks + more} of {self._total} blocks would be promised to pins and "
            f"reservations, and the longest request needs {self._longest}; end others first, or raise "
            "kv_memory"
        )

    @property
    def _longest_here(self) -> int:
        return max(queue.blocks_of_longest for queue in self._queues.values())


@dataclass(slots=True)
class _Kept:
    """The pin of one request."""

    tree: PrefixTree
    path: PinnedPath
    content: tuple[str, str, bytes]
    """The model, the salt, and a hash of the prompt."""
    tenant: str
    blocks: int
    """Blocks of the path's pages."""
    lease: float
    due: float
    """The time at which its lease runs out."""


class Pins:
    """The verbs pin and unpin, for bodies that have been checked."""

    def __init__(
        self, queues: Mapping[str, ModelQueue], promises: Promises, clock: Clock, lease: float
    ) -> None:
        """lease: seconds, if a body names none."""
        self._queues = queues
        self._promises = promises
        self._clock = clock
        self._lease = lease
        self._kept: dict[str, _Kept] = {}
        self._due: float | None = None  # of all, or earlier

    @property
    def due(self) -> float | None:
        """The time at which `expire` has something to do, or an earlier one."""
        return self._due

    def pin(self, body: Pin) -> Pinned:
        """Raises OutOfBlocks if the longest request would find no room beside the promised blocks, or if the
        body's tenant keeps too much; QueueFull if there are too many pins. After an error the request's
        earlier pin is as it was."""
        lease, content = body.lease or self._lease, _content(body)
        known = self._kept.get(body.request)
        if known is not None and known.content == content:
            known.lease = lease
            self.renew(body.request)
            return Pinned(tokens=known.path.tokens, lease=lease)
        if known is None and len(self._kept) >= MOST_PINS:
            raise QueueFull(f"{MOST_PINS} prefixes are pinned already; unpin others first", retry_after=1)
        cache = self._queues[body.model].cache
        tree = cache.prefixes
        path = tree.pin(body.prompt, body.salt)
        blocks = cache.geometry.blocks(path.tokens) if path is not None else 0
        if known is not None:  # what it gives back counts for the new one
            known.tree.unpin(known.path)
        if path is not None and (refusal := self._refusal(body, blocks)):
            tree.unpin(path)
            if known is not None:
                known.tree.pin_again(known.path)
            raise refusal
        self._kept.pop(body.request, None)
        if path is None:
            return Pinned(tokens=0, lease=lease)
        self._kept[body.request] = _Kept(tree, path, content, body.tenant, blocks, lease, 0.0)
        self.renew(body.request)
        return Pinned(tokens=path.tokens, lease=lease)

    def _refusal(self, body: Pin, blocks: int) -> OutOfBlocks | None:
        """Returns why a new pin of `blocks` blocks, which is in its tree already, may not stay."""
        if not self._promises.within():
            return self._promises.refusal("pin")
        if not body.tenant:
            return None
        others = (one for request, one in self._kept.items() if request != body.request)
        kept = blocks + sum(one.blocks for one in others if one.tenant == body.tenant)
        if kept <= self._promises.of_a_tenant:
            return None
        return OutOfBlocks(
            f"pin: the pins of {body.tenant} would keep {kept} blocks; {self._promises.of_a_tenant} is the "
            "most for one tenant; unpin others first, or let their leases run out"
        )

    def renew(self, request: str) -> float | None:
        """Keeps the pin for its lease from now on. Returns the lease in seconds; None if the request has no
        pin."""
        kept = self._kept.get(request)
        if kept is None:
            return None
        kept.due = self._clock.now() + kept.lease
        self._due = kept.due if self._due is None else min(self._due, kept.due)
        return kept.lease

    def unpin(self, request: str) -> int:
        """Returns how many tokens the pin kept; 0 if the request has no pin."""
        kept = self._kept.pop(request, None)
        if kept is None:
            return 0
        kept.tree.unpin(kept.path)
        return kept.path.tokens

    def unpin_all(self) -> None:
        for request in list(self._kept):
            self.unpin(request)

    def expire(self) -> None:
        """Undoes the pins whose lease has run out."""
        now = self._clock.now()
        if self._due is None or self._due > now:
            return
        for request in [request for request, kept in self._kept.items() if kept.due <= now]:
            self.unpin(request)
        self._due = min((kept.due for kept in self._kept.values()), default=None)


def _content(body: Pin) -> tuple[str, str, bytes]:
    prompt = blake2b(np.asarray(body.prompt, dtype=np.int32).tobytes(), digest_size=16).digest()
    return body.model, body.salt, prompt
