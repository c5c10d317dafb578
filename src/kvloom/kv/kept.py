"""Cached prefixes that outlive their blocks: pages that give way go to a store, and come back from it before
a request that begins with them is enqueued, so that its sequence finds them cached.

A store may be slow or broken. Nothing waits for it longer than `LONGEST_WAIT`, and not at all while it owes
an answer, or for some time after it was late, or slower than computing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvloom.kv.cache import ModelCache
from kvloom.kv.page_keys import page_keys, root_key
from kvloom.kv.pool import Pool
from kvloom.kv.prefix import CachedPage
from kvloom.types.clock import Clock
from kvloom.types.errors import OutOfBlocks
from kvloom.types.geometry import AnyArray
from kvloom.types.prefix_store import PageName, PrefixStore

LONGEST_WAIT: Final = 2.0
"""Seconds that a request waits for a store at most."""
LEAST_WAIT: Final = 0.05
"""Seconds that it may wait however soon its tokens would be computed."""
STALL: Final = 0.5
"""Seconds that it waits for the next pages at most."""
RETRY: Final = 30.0
"""Seconds for which a store that was late, or slower than computing, is not read."""
SAVING: Final = 2.0
"""Seconds that an engine which ends takes for its hottest prefixes; its process is given few more."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The tokens that a request begins with, as far as they fill pages."""

    cache: ModelCache
    tokens: Sequence[int]
    salt: str

    @property
    def width(self) -> int:
        return self.cache.geometry.tokens_per_block

    @property
    def cached(self) -> int:
        """Returns how many of its pages are cached. They count as used now."""
        _, length = self.cache.prefixes.match(self.tokens, len(self.tokens), self.salt)
        return length // self.width

    def names(self) -> list[PageName]:
        """Returns the names of all its pages."""
        root = root_key(self.width, self.salt)
        return [PageName(self.cache.model, root, key) for key in page_keys(root, self.tokens, self.width)]


class KeptPrefixes:
    """One unit's prefixes in a store."""

    def __init__(self, pool: Pool, store: PrefixStore, clock: Clock, new_id: Callable[[], int]) -> None:
        """new_id: gives ids of sequences."""
        self._pool = pool
        self._store = store
        self._clock = clock
        self._new_id = new_id
        self._turn: asyncio.Future[None] | None = None  # done when the request that reads now has ended that
        self._late: asyncio.Future[list[AnyArray]] | None = None  # a read that nobody waits for any more
        self._again = clock.now()  # when the store may be read again
        pool.recency.on_reclaim = self._save

    # -- from the store -------------------------------------------------------------------------------

    async def bring_back(self, model: str, tokens: Sequence[int], salt: str = "", speed: float = 0.0) -> int:
        """Caches as many pages of `tokens` as the store has behind those that are cached, and as come in
        time. Returns the number of tokens. speed: tokens a second that are computed, if that is known."""
        cache = self._pool.caches[model]
        width = cache.geometry.tokens_per_block
        wanted = _Wanted(cache, tokens[: len(tokens) - len(tokens) % width], salt)
        lacking = len(wanted.tokens) - wanted.cached * width
        if not lacking or self._is_unwell:
            return 0
        began = self._clock.now()
        until = began + (min(LONGEST_WAIT, max(LEAST_WAIT, lacking / speed)) if speed else LONGEST_WAIT)
        while self._turn is not None:
            if not await self._in_time(self._turn, until) or self._is_unwell:
                return 0
        turn = self._turn = asyncio.get_running_loop().create_future()
        try:
            began = self._clock.now()
            brought = await self._read(wanted, until)
        finally:
            self._turn = None
            turn.set_result(None)
        if brought and speed and self._clock.now() - began > max(LEAST_WAIT, brought / speed):
            self._again = self._clock.now() + RETRY  # computing them would have been quicker
        return brought

    @property
    def _is_unwell(self) -> bool:
        return self._late is not None or self._clock.now() < self._again

    async def _read(self, wanted: _Wanted, until: float) -> int:
        """Returns the number of tokens that have become cached."""
        names, brought = wanted.names(), 0
        while (begin := wanted.cached) < len(names):
            reading = asyncio.ensure_future(self._store.read(names[begin:]))
            try:
                await self._in_time(reading, min(until, self._clock.now() + STALL))
            finally:
                if not reading.done():
                    self._late = reading
                    reading.add_done_callback(self._answered)
            if not reading.done():
                break
            placed = self._place(wanted, begin, reading.result())
            brought += placed
            if not placed or self._clock.now() >= until:
                break
        return brought

    def _answered(self, _: asyncio.Future[list[AnyArray]]) -> None:
        """Notes that a late read has ended. What it has read is not placed: nobody waits for it."""
        self._late = None
        self._again = self._clock.now() + RETRY

    def _place(self, wanted: _Wanted, begin: int, pages: list[AnyArray]) -> int:
        """Caches pages, the first of which is page `begin` of what is wanted. Returns the number of tokens; 0
        if the blocks are short, or what comes before them is not cached any more."""
        cache, width = wanted.cache, wanted.width
        end = (begin + len(pages)) * width
        sequence = self._new_id()
        matched = cache.adopt(sequence, wanted.tokens, end, salt=wanted.salt, whole_pages=True)
        try:
            if not begin * width <= matched < end:
                return 0
            blocks = cache.prepare_receive(sequence, end - matched)
            self._store.place(cache.model, pages[matched // width - begin :], blocks)
            cache.commit_receive(sequence, end - matched)
            cache.keep(sequence, wanted.tokens)
        except OutOfBlocks:
            return 0
        finally:
            cache.remove_sequence(sequence)
        return end - matched

    async def _in_time(self, future: asyncio.Future[Any], until: float) -> bool:
        """Waits for a future, but until `until` at most. Returns whether it is done."""
        timer = asyncio.ensure_future(self._clock.sleep(max(0.0, until - self._clock.now())))
        try:
            await asyncio.wait((future, timer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
        return future.done()

    # -- to the store ---------------------------------------------------------------------------------

    def _save(self, gone: Sequence[CachedPage]) -> None:
        """Saves what gives way, those that come first in their prompts before others, which are worth nothing
        without them."""
        for page in gone:
            if not self._store.save(page.name, page.blocks):
                return

    async def save_hottest(self) -> None:
        """Saves what is cached, most recently used first, as far as `SAVING` seconds allow. No job runs."""
        until = self._clock.now() + SAVING
        for page in self._pool.recency.hottest():
            if self._clock.now() >= until:
                return
            while page.is_here and not self._store.save(page.name, page.blocks):
                if not await self._all_written(until):
                    return
        await self._all_written(until)

    async def _all_written(self, until: float) -> bool:
        writing = asyncio.ensure_future(self._store.written())
        try:
            return await self._in_time(writing, until)
        finally:
            writing.cancel()

    def forget(self, model: str, tokens: Sequence[int], salt: str = "") -> None:
        """Gives up what the store has of `tokens`, but for pages that are still cached; without tokens all
        that it has with the salt, and without a salt either, all of the model."""
        wanted = _Wanted(self._pool.caches[model], tokens, salt)
        if not tokens:
            self._store.forget(model, root_key(wanted.width, salt) if salt else b"")
            return
        names = wanted.names()[wanted.cached :]
        if names:
            self._store.forget(model, names[0].root, [name.key for name in names])
