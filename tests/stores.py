"""A store of prefixes in memory, over an executor's arena of numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvloom.types.geometry import I32, AnyArray
from kvloom.types.prefix_store import PageName
from tests.plane import Numbers


class MemoryStore:
    """Satisfies `PrefixStore`. pages: what is kept, which outlives engines and may be tampered with by tests.
    most: pages that a read returns. room: pages that may be saved before `written` is awaited. gate: while it
    is closed, reads do not end, nor does `written`."""

    def __init__(self, most: int = 3, room: int = 1000) -> None:
        self.pages: dict[PageName, AnyArray] = {}
        self.reads: list[list[PageName]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.most = most
        self._room = room
        self._staged = 0

    def over(self, executor: Numbers) -> MemoryStore:
        """The store for another life of the unit."""
        self._arena = executor.arena
        self.reads.clear()
        return self

    def save(self, name: PageName, blocks: I32) -> bool:
        if name not in self.pages:
            if self._staged == self._room:
                return False
            self._staged += 1
            self.pages[name] = self._arena[blocks].copy()
        return True

    async def written(self) -> None:
        await self.gate.wait()
        self._staged = 0

    async def read(self, names: Sequence[PageName]) -> list[AnyArray]:
        self.reads.append(list(names))
        found = []
        for name in names[: self.most]:
            if name not in self.pages:
                break
            found.append(self.pages[name])
        await self.gate.wait()
        return found

    def place(self, model: str, pages: Sequence[AnyArray], blocks: I32) -> None:
        for page, into in zip(pages, blocks, strict=True):
            self._arena[into] = page

    def forget(self, model: str, root: bytes = b"", keys: Sequence[bytes] = ()) -> None:
        for name in list(self.pages):
            if name.model == model and root in (b"", name.root) and (not keys or name.key in keys):
                del self.pages[name]

    def close(self) -> None:
        """Does nothing: what is kept outlives engines."""
