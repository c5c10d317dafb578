"""Which sequences of a model are to be away, and who gives way where there is too little room."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from operator import attrgetter
from typing import Final

from kvloom.engine.sequence import Sequence
from kvloom.kv.cache import ModelCache
from kvloom.types.geometry import Geometry

KEPT: Final = 16  # of the loan's pages, one in so many: nobody goes out into them
COPIED: Final = 8  # of the pages that a step is over, one in so many is copied for those that move
_GOLDEN = 0x9E3779B97F4A7C15  # of 2⁶⁴: multiples of it fill the word evenly, however many there are
_WORD = 1 << 64
_ORDER = attrgetter("order")


class Budget:
    """What one step may copy, so that it takes little longer than the others: of the pages that it is over a
    part, or, for the first that moves, all it has."""

    def __init__(self, pages: int) -> None:
        """pages: that the step is over."""
        self._most = pages // COPIED
        self._copied = 0

    def takes(self, pages: int) -> bool:
        """Count them, if they may be copied too."""
        if self._copied and self._copied + pages > self._most:
            return False
        self._copied += pages
        return True


class Places:
    """away: by id, those that have a place in the loan. share: of the sequences, those that are to be there.
    rows: so many may be. Nothing here changes a cache."""

    def __init__(self, cache: ModelCache, share: float, rows: int) -> None:
        """cache: over the loan's blocks."""
        self.away: dict[int, Sequence] = {}
        self.share = share
        self.rows = rows
        self._cache = cache
        self._kept = -(-len(cache.pages.refs) // KEPT)
        self._urged: set[int] = set()

    @property
    def roomy(self) -> bool:
        """There is room for more than what those away may append."""
        return self._cache.pages.available > self._kept and len(self.away) < self.rows

    @property
    def mark(self) -> tuple[int, int, float]:
        """Another one where `urged` may answer otherwise."""
        return self._cache.changes, len(self._urged), self.share

    def has(self, sequence: Sequence) -> bool:
        """It is away, or on its way there."""
        return sequence.id in self.away

    def wants(self, sequence: Sequence) -> bool:
        """Whether it is to be away: its number says so, or it had to make room at home."""
        chosen = (sequence.id * _GOLDEN) % _WORD < self.share * _WORD or sequence.id in self._urged
        return chosen and self.share > 0 and sequence.transfer is None

    def set_share(self, share: float) -> None:
        """Where it falls, those that had to make room at home are as any others again."""
        if share < self.share:
            self._urged.clear()
        self.share = share

    # -- who gives way --------------------------------------------------------------------------------

    def displaced(self, sequence: Sequence) -> list[Sequence] | None:
        """Who makes room there, by being computed again, for a sequence that would be at home: nobody, where
        there is more than what is kept, or else some that are away and have a lower priority. None where
        these are not enough, or it cannot go."""
        if not self.share or not sequence.decodes or sequence.transfer or sequence.id in self._urged:
            return None
        need, found = self._room_for(sequence), list[Sequence]()
        there = self.free(other for other in self.away.values() if not other.in_job)
        if need <= there - self._kept and len(self.away) < self.rows:
            return found
        for other in sorted(self.away.values(), key=_ORDER, reverse=True):
            if found and need <= there:
                break
            if other.order[0] > sequence.order[0] and not other.in_job:
                there += len(self._cache.page_list(other.id)) + self._appends(other)
                found.append(other)
        return found if found and need <= there else None

    def urge(self, sequence: Sequence) -> None:
        """It is to go with the next step, if there is room by then, and all of that."""
        self._urged.add(sequence.id)

    def forget(self, sequence: Sequence) -> None:
        """It is as any other again."""
        self._urged.discard(sequence.id)

    def urged(self, ready: Sequences[Sequence]) -> list[Sequence]:
        """Those at home that go out with the next step, if it is of `ready`, whatever else it does."""
        found: list[Sequence] = []
        if not self._urged or not self.share:
            return found
        there = self.free(filter(self.has, ready))
        for sequence in ready:
            if sequence.id in self._urged and not self.has(sequence):
                need = self._room_for(sequence)
                if need <= there and len(self.away) + len(found) < self.rows:
                    there -= need
                    found.append(sequence)
        return found

    # -- who is where in the next step ----------------------------------------------------------------

    def divide(
        self, sequences: Iterable[Sequence], room: int, home: Geometry
    ) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """Of those away, the most urgent first: who finds room for its next token there, who only in `room`
        blocks at home, and who nowhere."""
        stay, back, crowded = list[Sequence](), list[Sequence](), list[Sequence]()
        there = self._cache.pages.available
        for sequence in sorted(filter(self.has, sequences), key=_ORDER):
            need, blocks = self._appends(sequence), home.blocks(sequence.computed + 1)
            if need <= there:
                there -= need
                stay.append(sequence)
            elif blocks <= room:
                room -= blocks
                back.append(sequence)
            else:
                crowded.append(sequence)
        return stay, back, crowded

    def called_back(
        self, stay: Iterable[Sequence], room: int, home: Geometry, budget: Budget
    ) -> list[Sequence]:
        """Who is not to be away any more, and finds room in `room` blocks at home."""
        found: list[Sequence] = []
        for sequence in stay:
            blocks = home.blocks(sequence.computed + 1)
            if not self.wants(sequence) and blocks <= room and budget.takes(self.length(sequence)):
                room -= blocks
                found.append(sequence)
        return found

    def going(
        self, here: Iterable[Sequence], first: Sequences[Sequence], stay: Iterable[Sequence], budget: Budget
    ) -> list[Sequence]:
        """Who of those at home is to be away, and finds room there that leaves those away some for what they
        append: who is let into the last of it would have to come back a few steps later. first: those that go
        whatever the others do."""
        found = list(first)
        there = self.free(stay) - self._kept - sum(map(self._room_for, first))
        for sequence in here if self.share else ():
            need = self._room_for(sequence)
            if not self.wants(sequence) or need > there or sequence in first:
                continue
            if len(self.away) + len(found) < self.rows and budget.takes(self.length(sequence)):
                there -= need
                found.append(sequence)
        return found

    # -- in pages -------------------------------------------------------------------------------------

    def length(self, sequence: Sequence) -> int:
        """That it has."""
        return self._cache.geometry.pages(sequence.computed)

    def free(self, away: Iterable[Sequence]) -> int:
        """That are left there when these have room for their next token; less than 0 where they have not."""
        return self._cache.pages.available - sum(map(self._appends, away))

    def _appends(self, sequence: Sequence) -> int:
        """That its next token takes away."""
        return self._cache.blocks_for(sequence.id, 1) // self._cache.geometry.blocks_per_page

    def _room_for(self, sequence: Sequence) -> int:
        """That it would take there, with its next token."""
        return self._cache.geometry.pages(sequence.computed + 1)
