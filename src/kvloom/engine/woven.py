"""A model's loan at the unit that borrows: which of its sequences are away, and what a decode step does then
(Weaver, sections 4.1 and 4.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from kvloom.core.plan import Plan
from kvloom.core.weaving import Away, Move
from kvloom.engine.sequence import Sequence
from kvloom.kv.cache import ModelCache
from kvloom.kv.pool import Pool

_GOLDEN = 0x9E3779B97F4A7C15  # of 2⁶⁴: multiples of it fill the word evenly, however many there are
_WORD = 1 << 64

Batch = list[tuple[Sequence, int]]


class Woven:
    """A sequence that is away has its K and V in the loan, and an empty place in the cache at home. Whether
    it is to be away, its number says and `share`, which may be set at any time: the step after it moves those
    that it concerns, as far as there is room where they go."""

    def __init__(
        self,
        home: ModelCache,
        blocks: int,
        share: float,
        *,
        rows: int,
        max_tokens: int,
        ended: Callable[[str], None],
    ) -> None:
        """blocks: of the loan. rows: sequences that may be away. ended: called with the reason when it is
        over."""
        self.share = share
        self.rows = rows
        self._home = home
        pool = Pool(
            blocks, {home.model: home.geometry}, max_sequences=rows, max_tokens={home.model: max_tokens}
        )
        self.pool = pool
        self.cache = pool.caches[home.model]
        self._away: dict[int, Sequence] = {}
        self.went = 0  # sequences, ever
        self.came = 0
        self.tokens = 0  # computed away, ever
        self.short = False  # requests have waited for blocks since this was last unset
        self.withdrawn = False  # by the lender, it says
        self._ended = ended
        self._step_away: Plan | None = None  # of the step that runs
        self._moving: list[tuple[Sequence, bool]] = []  # in it; True: out

    @property
    def roomy(self) -> bool:
        """A sixteenth of the loan, at least, is free for more."""
        return 16 * self.pool.available >= self.pool.total and len(self._away) < self.rows

    @property
    def away(self) -> int:
        """Sequences, now."""
        return len(self._away)

    def has(self, sequence: Sequence) -> bool:
        """It is away, or on its way there."""
        return sequence.id in self._away

    def wants(self, sequence: Sequence) -> bool:
        """Whether it is one of the share that is to be away."""
        return (sequence.id * _GOLDEN) % _WORD < self.share * _WORD and sequence.outbound is None

    def crowded(self, ready: Iterable[Sequence], room: int) -> list[Sequence]:
        """Those away that find room for their next token neither there nor in `room` blocks at home."""
        return self._divide(ready, room)[2]

    def plan(self, batch: Batch, room: int) -> tuple[Batch, Plan, Away]:
        """One decode step of `batch`, of whom none is crowded: the batch in the order of its rows, and what
        is done at home and away. room: blocks at home that the step does not need for those who are there.
        Until it has landed, or failed, no other is planned."""
        here = [s for s, _ in batch if not self.has(s)]
        stay, back, _ = self._divide((s for s, _ in batch), room)
        there = self.cache.pages.available - sum(map(self._pages, stay))
        go: list[Sequence] = []
        for sequence in here if self.share else ():
            need = self.cache.geometry.pages(sequence.computed + 1)
            if self.wants(sequence) and need <= there and len(self._away) + len(go) < self.rows:
                there -= need
                go.append(sequence)
        moves = [self._move(sequence, out=False) for sequence in back]
        moves += [self._move(sequence, out=True) for sequence in go]
        self._moving = [(s, False) for s in back] + [(s, True) for s in go]
        here, away = [s for s in here if s not in go] + back, stay + go
        home, lent = _step(self._home, here), _step(self.cache, away)
        self._step_away = lent if away else None
        return [(s, 1) for s in here + away], home, Away(lent, tuple(moves))

    def land(self, lost: str | None) -> tuple[set[int], list[Sequence]]:
        """The step that was planned has ended; lost: why what was away, or moved, of it does not count.
        Then the loan is over. Returns the ids of the sequences of which nothing counts, and those of them
        whose K and V are lost."""
        if lost is not None:
            void = set(self._away)
            gone = self._undo()
            self._ended(lost)
            return void, gone
        if self._step_away is not None:
            self.cache.end_forward(self._step_away)
            self.tokens += len(self._step_away.sequences)
        for sequence, out in self._moving:
            self._leave(sequence, home=out)
            self.went, self.came = self.went + out, self.came + (not out)
        self._step_away, self._moving = None, []
        return set(), []

    def fail(self) -> None:
        """The step has failed, and with it its sequences. So is the loan over: what nobody collects of a task
        may still be written to its blocks."""
        self._undo()
        self._ended("a step has failed")

    def remove(self, sequence: Sequence) -> None:
        """It gives up what it has away."""
        if self._away.pop(sequence.id, None) is not None:
            self.cache.remove_sequence(sequence.id)

    def _undo(self) -> list[Sequence]:
        """As if nothing were away. Those that were have nothing now, but who was on its way is still at
        home."""
        if self._step_away is not None:
            self.cache.abort_forward(self._step_away)
        leaving = {s.id for s, out in self._moving if out}
        for sequence, out in self._moving:
            if not out:
                self._leave(sequence, home=True)
        gone = [s for s in self._away.values() if s.id not in leaving]
        self._step_away, self._moving = None, []
        for sequence in list(self._away.values()):
            self.remove(sequence)
        return gone

    def _leave(self, sequence: Sequence, *, home: bool) -> None:
        """Give up what it holds at home, but for its place, or what it holds away."""
        if home:
            self._home.remove_sequence(sequence.id)
            self._home.add_sequence(sequence.id)
        else:
            self.remove(sequence)

    def _divide(
        self, sequences: Iterable[Sequence], room: int
    ) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """Of those away, who stays there, who comes back, because there is no room or it is not to be there
        any more, and who finds no room."""
        stay, back, crowded = list[Sequence](), list[Sequence](), list[Sequence]()
        there = self.cache.pages.available
        away = sorted((s for s in sequences if self.has(s)), key=lambda s: s.order)
        for sequence in away:
            need, blocks = self._pages(sequence), self._home.geometry.blocks(sequence.computed + 1)
            if need <= there:
                there -= need
                stay.append(sequence)
            elif blocks <= room:
                room -= blocks
                back.append(sequence)
            else:
                crowded.append(sequence)
        for sequence in [s for s in stay if not self.wants(s)]:
            blocks = self._home.geometry.blocks(sequence.computed + 1)
            if blocks <= room:
                room -= blocks
                stay.remove(sequence)
                back.append(sequence)
        return stay, back, crowded

    def _pages(self, sequence: Sequence) -> int:
        """That its next token takes away."""
        return self.cache.blocks_for(sequence.id, 1) // self.cache.geometry.blocks_per_page

    def _move(self, sequence: Sequence, *, out: bool) -> Move:
        """Room where it goes; what it leaves it keeps until the step has landed."""
        id_, count = sequence.id, sequence.computed
        target = self.cache if out else self._home
        if out:
            self._away[id_] = sequence
            target.add_sequence(id_)
        target.prepare_receive(id_, count)
        target.commit_receive(id_, count)
        width = self.cache.geometry.tokens_per_block
        firsts = np.arange(self.cache.geometry.pages(count), dtype=np.int32) * width
        pages = (np.array(cache.page_list(id_), np.int32) for cache in (self._home, self.cache))
        home, away = (each[: len(firsts)] for each in pages)
        return Move(home, away, np.minimum(width, count - firsts).astype(np.int32), out)


def _step(cache: ModelCache, sequences: list[Sequence]) -> Plan:
    if sequences:
        return cache.begin_forward([s.id for s in sequences], [1] * len(sequences))
    return replace(Plan.none(cache.model, cache.pages.map), versions=cache.pages.versions)
