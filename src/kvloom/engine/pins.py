"""What callers have pinned, each for a request and a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np

from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.promises import Promises
from kvloom.kv.prefix import PinnedPath, PrefixTree
from kvloom.types.clock import Clock
from kvloom.types.errors import QueueFull
from kvloom.types.verbs import Pin, Pinned

MOST: Final = 4096  # of one unit


@dataclass(slots=True)
class _Kept:
    """content: of which model and prompt it is. due: when its lease runs out."""

    tree: PrefixTree
    path: PinnedPath
    content: tuple[str, bytes]
    lease: float
    due: float


class Pins:
    """The verbs pin and unpin, for bodies that have been checked. lease: seconds, where a body names none."""

    def __init__(
        self, queues: Mapping[str, ModelQueue], promises: Promises, clock: Clock, lease: float
    ) -> None:
        self._queues = queues
        self._promises = promises
        self._clock = clock
        self._lease = lease
        self._kept: dict[str, _Kept] = {}
        self._due: float | None = None  # of all, or earlier

    @property
    def due(self) -> float | None:
        """When `expire` has something to do, or earlier."""
        return self._due

    def pin(self, body: Pin) -> Pinned:
        """Raises OutOfBlocks where the longest request would find no room beside what is promised, QueueFull
        where there are too many; what the request has pinned before is then as it was."""
        lease, content = body.lease or self._lease, _content(body)
        known = self._kept.get(body.request)
        if known is not None and known.content == content:
            known.lease = lease
            self.renew(body.request)
            return Pinned(tokens=known.path.tokens, lease=lease)
        if known is None and len(self._kept) >= MOST:
            raise QueueFull(f"{MOST} prefixes are pinned already; unpin others first", retry_after=1)
        tree = self._queues[body.model].cache.prefixes
        path = tree.pin(body.prompt)
        if known is not None:  # what it gives back counts for the new one
            known.tree.unpin(known.path)
        if path is not None and not self._promises.within():
            refusal = self._promises.refusal("pin")
            tree.unpin(path)
            if known is not None:
                known.tree.pin_again(known.path)
            raise refusal
        self._kept.pop(body.request, None)
        if path is None:
            return Pinned(tokens=0, lease=lease)
        self._kept[body.request] = _Kept(tree, path, content, lease, 0.0)
        self.renew(body.request)
        return Pinned(tokens=path.tokens, lease=lease)

    def renew(self, request: str) -> float | None:
        """For its lease from now on, in seconds; None where the request has no pin."""
        kept = self._kept.get(request)
        if kept is None:
            return None
        kept.due = self._clock.now() + kept.lease
        self._due = kept.due if self._due is None else min(self._due, kept.due)
        return kept.lease

    def unpin(self, request: str) -> int:
        """How many tokens it kept: 0 where the request has no pin."""
        kept = self._kept.pop(request, None)
        if kept is None:
            return 0
        kept.tree.unpin(kept.path)
        return kept.path.tokens

    def unpin_all(self) -> None:
        for request in list(self._kept):
            self.unpin(request)

    def expire(self) -> None:
        """Undo the pins whose lease has run out."""
        now = self._clock.now()
        if self._due is None or self._due > now:
            return
        for request in [request for request, kept in self._kept.items() if kept.due <= now]:
            self.unpin(request)
        self._due = min((kept.due for kept in self._kept.values()), default=None)


def _content(body: Pin) -> tuple[str, bytes]:
    return body.model, blake2b(np.asarray(body.prompt, dtype=np.int32).tobytes(), digest_size=16).digest()
