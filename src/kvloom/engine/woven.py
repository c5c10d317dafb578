"""A model's loan at the unit that borrows: which of its sequences are away, and what a decode step does then
(Weaver, sections 4.1 and 4.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from kvloom.engine.places import Budget, Places
from kvloom.engine.sequence import Sequence
from kvloom.kv.cache import ModelCache
from kvloom.kv.pool import Pool
from kvloom.types.offload import Away, Move
from kvloom.types.plan import Plan

Batch = list[tuple[Sequence, int]]


class Woven:
    """A sequence that is away has its K and V in the loan, and an empty place in the cache at home. Whether
    it is to be away, its number says and `share`, which may be set at any time: the steps after it move those
    that it concerns, as far as there is room where they go, and a few at a time."""

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
        self._home = home
        pool = Pool(
            blocks, {home.model: home.geometry}, max_sequences=rows, max_tokens={home.model: max_tokens}
        )
        self.pool = pool
        self.cache = pool.caches[home.model]
        self.places = Places(self.cache, share, rows)
        self.went = 0  # sequences, ever
        self.came = 0
        self.tokens = 0  # computed away, ever
        self.short = False  # requests have waited for blocks since this was last unset
        self.withdrawn = False  # by the lender, it says
        self._ended = ended
        self._step_away: Plan | None = None  # of the step that runs
        self._moving: list[tuple[Sequence, bool]] = []  # in it; True: out

    @property
    def share(self) -> float:
        """Of the sequences, those that are to be away."""
        return self.places.share

    @share.setter
    def share(self, share: float) -> None:
        self.places.set_share(share)

    @property
    def away(self) -> int:
        """Sequences, now."""
        return len(self.places.away)

    def has(self, sequence: Sequence) -> bool:
        """It is away, or on its way there."""
        return self.places.has(sequence)

    def crowded(self, ready: Iterable[Sequence], room: int) -> list[Sequence]:
        """Those away that find room for their next token neither there nor in `room` blocks at home, the
        most urgent first."""
        return self.places.divide(ready, room, self._home.geometry)[2]

    def plan(self, batch: Batch, room: int) -> tuple[Batch, Plan, Away]:
        """One decode step of `batch`, of whom none is crowded: the batch in the order of its rows, and what
        is done at home and away. room: blocks at home that the step does not need for those who are there.
        Who would have to come back, when as much as a step may copy is copied already, is not in it. Until it
        has landed, or failed, no other is planned."""
        places, form, sequences = self.places, self._home.geometry, [s for s, _ in batch]
        here, first = [s for s in sequences if not self.has(s)], places.urged(sequences)
        budget = Budget(sum(map(places.length, sequences)))
        stay, back, _ = places.divide(sequences, room, form)
        back = [s for s in back if budget.takes(places.length(s))]
        room -= sum(form.blocks(s.computed + 1) for s in back)
        called = places.called_back(stay, room, form, budget)
        go = places.going(here, first, stay, budget)
        stay, back = [s for s in stay if s not in called], back + called
        self._moving, moves = [], list[Move]()
        for sequence in back + go:
            out = sequence not in back
            move = self._move(sequence, out=out)
            if move.tokens.size:
                self._moving.append((sequence, out))
                moves.append(move)
            else:  # all of it is cached at home: it is there now
                self._arrived(sequence, out=out)
        here, away = [s for s in here if s not in go] + back, stay + go
        home, lent = _step(self._home, here), _step(self.cache, away)
        self._step_away = lent if away else None
        return [(s, 1) for s in here + away], home, Away(lent, tuple(moves))

    def land(self, lost: str | None) -> tuple[set[int], list[Sequence]]:
        """The step that was planned has ended; lost: why what was away, or moved, of it does not count.
        Then the loan is over. Returns the ids of the sequences of which nothing counts, and those of them
        whose K and V are lost."""
        if lost is not None:
            void = set(self.places.away)
            gone = self._undo()
            self._ended(lost)
            return void, gone
        if self._step_away is not None:
            self.cache.end_forward(self._step_away)
            self.tokens += len(self._step_away.sequences)
        for sequence, out in self._moving:
            if out:  # for the next that begins like it, and for itself, where the loan ends
                self._home.keep(sequence.id, sequence.tokens.list(), tail=True)
            self._arrived(sequence, out=out)
        self._step_away, self._moving = None, []
        return set(), []

    def fail(self) -> list[Sequence]:
        """The step has failed, and with it its sequences. So is the loan over: what nobody collects of a task
        may still be written to its blocks. Returns all that have lost their K and V, some of whom were not in
        the step."""
        gone = self._undo()
        self._ended("a step has failed")
        return gone

    def remove(self, sequence: Sequence) -> None:
        """It gives up what it has away."""
        self.places.forget(sequence)
        if self.places.away.pop(sequence.id, None) is not None:
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
        gone = [s for s in self.places.away.values() if s.id not in leaving]
        self._step_away, self._moving = None, []
        for sequence in list(self.places.away.values()):
            self.remove(sequence)
        return gone

    def _arrived(self, sequence: Sequence, *, out: bool) -> None:
        self._leave(sequence, home=out)
        self.went, self.came = self.went + out, self.came + (not out)

    def _leave(self, sequence: Sequence, *, home: bool) -> None:
        """Give up what it holds at home, but for its place, or what it holds away."""
        if home:
            self._home.remove_sequence(sequence.id)
            self._home.add_sequence(sequence.id)
        else:
            self.remove(sequence)

    def _move(self, sequence: Sequence, *, out: bool) -> Move:
        """Room where it goes; what it leaves it keeps until the step has landed. At home it begins with what
        is cached there of it."""
        id_, count, width = sequence.id, sequence.computed, self.cache.geometry.tokens_per_block
        target, found = self.cache if out else self._home, 0
        if out:
            self.places.away[id_] = sequence
            target.add_sequence(id_)
        else:
            target.remove_sequence(id_)
            found = target.adopt(id_, sequence.tokens.list(), count, whole_pages=True)
        if count > found:
            target.prepare_receive(id_, count - found)
            target.commit_receive(id_, count - found)
        firsts = np.arange(found, count, width, dtype=np.int32)
        pages = (np.array(cache.page_list(id_), np.int32) for cache in (self._home, self.cache))
        home, away = (each[firsts // width] for each in pages)
        return Move(home, away, np.minimum(width, count - firsts).astype(np.int32), out)


def _step(cache: ModelCache, sequences: list[Sequence]) -> Plan:
    if sequences:
        return cache.begin_forward([s.id for s in sequences], [1] * len(sequences))
    return replace(Plan.none(cache.model, cache.pages.map), versions=cache.pages.versions)
