"""Plans a model's decode steps: which sequences are computed at home, and which are offloaded to a lender
(Weaver, sections 4.1 and 4.3). This is the seam `plan` of docs/weaving.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Generic

import numpy as np

from kvloom.kv.cache import ModelCache
from kvloom.kv.pool import Pool
from kvloom.offload.policy import KEPT, CopyBudget, OffloadPolicy, S
from kvloom.types.job import ForwardPlan, Job, OffloadedRows, PageMove

Batch = list[tuple[S, int]]  # sequences with the tokens that each appends


class DecodePlanner(Generic[S]):
    """Plans the decode steps of a model that has borrowed nothing: all sequences and all rows are at home."""

    multi_step = True
    """Whether a decode job may take several steps, or several tokens of a sequence."""
    mixes = True
    """Whether a decode step may have a prompt's chunk beside it."""

    def __init__(self, home: ModelCache, tokens_total: int = 0) -> None:
        """tokens_total: tokens whose attention another unit has ever computed, under earlier loans too."""
        self.home = home
        self.tokens_total = tokens_total

    @property
    def share(self) -> float:
        """The part of the sequences that is to be offloaded."""
        return 0.0

    @property
    def count(self) -> int:
        """Sequences that are offloaded now."""
        return 0

    def is_home(self, sequence: S) -> bool:
        """Returns whether the sequence's K and V, if it has any, are on this unit."""
        return True

    def ready(self, sequences: list[S]) -> list[S]:
        """Returns the sequences that the next step takes, out of these, which all have one token pending."""
        return sequences

    def takers(self, ready: Sequence[S]) -> list[int]:
        """Returns the ids of the sequences that take blocks at home for their next token."""
        return [s.id for s in ready]

    def givers(self, victim: S) -> list[S]:
        """Returns the sequences that are to be computed again, so that the blocks of `victim`, which is at
        home, become free."""
        return [victim]

    def crowded(self, ready: Sequence[S]) -> list[S]:
        """Returns the sequences that find no room for their next token, the most urgent first, even if the
        step takes nothing more at home."""
        return []

    def release(self, sequence: S) -> None:
        """Gives up what the sequence holds. Its K and V at home stay cached while nobody needs the blocks."""
        self.home.keep(sequence.id, sequence.tokens.list(), tail=True)
        self.home.remove_sequence(sequence.id)

    def plan(self, batch: Batch[S], ahead: int = 0) -> tuple[Batch[S], ForwardPlan, OffloadedRows | None]:
        """Plans one decode step of `batch`, of whom none is crowded: returns the batch in the order of its
        rows, and the plans of the rows at home and elsewhere. ahead: as in `ModelCache.begin_forward`. Raises
        OutOfBlocks, with nothing changed, if the pool is short."""
        ids, counts = [s.id for s, _ in batch], [n for _, n in batch]
        return batch, self.home.begin_forward(ids, counts, ahead, by_token=max(counts) > 1), None

    def finish(
        self, job: Job, lost: str | None, valid: Mapping[int, int] | None = None
    ) -> tuple[set[int], list[S]]:
        """Ends the forward of a job. lost: the reason why its offloaded rows do not count, if they do not.
        valid: as in `ModelCache.end_forward`. Returns the ids of the sequences for which the step does not
        count, and those of them whose K and V are lost."""
        self.home.end_forward(job.plan, valid)
        return set(), []

    def fail(self, job: Job) -> list[S]:
        """Aborts the forward of a job that has failed. Returns all sequences that have lost their K and V by
        that; some may not have been in the job."""
        self.home.abort_forward(job.plan)
        return []


@dataclass(frozen=True, slots=True)
class _Places(Generic[S]):
    """The places where the sequences of one step are computed: at home, or by the lender."""

    staying_home: list[S]
    returning: list[S]
    """Offloaded sequences that are computed at home from this step on."""
    staying_out: list[S]
    leaving: list[S]
    """Sequences at home that are offloaded from this step on."""


class OffloadingPlanner(DecodePlanner[S]):
    """Plans the decode steps of a model that has a loan: some sequences are at home, and some offloaded.

    An offloaded sequence is registered with the loan's cache alone; while a step copies it, with both caches.
    A sequence's id and `share`, which may be set at any time, decide whether it is to be offloaded
    (`OffloadPolicy.wants`): later steps move the sequences that this concerns, as far as there is room for
    them, and a few at a time.
    """

    multi_step = mixes = False

    def __init__(
        self,
        home: ModelCache,
        blocks: int,
        share: float,
        *,
        rows: int,
        max_tokens: int,
        ended: Callable[[str], None],
        tokens_total: int = 0,
    ) -> None:
        """blocks: those of the loan. rows: the most sequences that may be offloaded. ended: called with the
        reason when the loan is over."""
        super().__init__(home, tokens_total)
        self.pool = Pool(
            blocks, {home.model: home.geometry}, max_sequences=rows, max_tokens={home.model: max_tokens}
        )
        self.cache = self.pool.caches[home.model]
        self.cache.pages.on_change = home.pages.on_change
        self.policy = OffloadPolicy[S](self.cache, share, rows)
        self.went = self.came = 0  # sequences that moved out, and back
        self.tokens = 0  # whose attention the lender has computed under this loan
        self.short = False  # requests have waited for blocks since this was last unset
        self.withdrawn = False  # the lender says that it has its blocks back
        self._ended = ended
        self._step: ForwardPlan | None = None  # over the loan's blocks, of the step that runs
        self._moving: list[tuple[S, bool]] = []  # in that step; True: out

    @property
    def share(self) -> float:
        return self.policy.share

    @share.setter
    def share(self, share: float) -> None:
        self.policy.set_share(share)
        self.home.pages.on_change()

    @property
    def count(self) -> int:
        return len(self.policy.offloaded)

    @property
    def needless(self) -> bool:
        """Whether home has room for all offloaded sequences, and one page in `KEPT` is left over."""
        sequences = self.policy.offloaded.values()
        need = sum(self.home.geometry.pages(sequence.computed + 1) for sequence in sequences)
        return need + len(self.home.pages.refs) // KEPT <= self.home.pages.available

    def is_home(self, sequence: S) -> bool:
        return not self.policy.has(sequence)

    def ready(self, sequences: list[S]) -> list[S]:
        """Returns what `DecodePlanner.ready` does. If some sequences move out with the step to make room for
        others, the latter wait for that."""
        leaving = self.policy.urged(sequences)
        if not leaving:
            return sequences
        room, late = self._available, set[int]()
        for sequence in sorted(sequences, key=attrgetter("order")):
            if self.is_home(sequence) and sequence not in leaving:
                need = self.home.blocks_for(sequence.id, 1)
                if need <= room:
                    room -= need
                else:
                    late.add(sequence.id)
        return [s for s in sequences if s.id not in late]

    def takers(self, ready: Sequence[S]) -> list[int]:
        leaving = self.policy.urged(ready)
        return [s.id for s in ready if self.is_home(s) and s not in leaving]

    def givers(self, victim: S) -> list[S]:
        """Returns the sequences that are to be computed again. If the loan has room for `victim`, or
        sequences there have a lower priority, `victim` goes there instead."""
        others = self.policy.displaced(victim)
        if others is None:
            return [victim]
        self.policy.urge(victim)
        self.home.pages.on_change()
        return others

    def crowded(self, ready: Sequence[S]) -> list[S]:
        return self.policy.divide(ready, self._spare(ready), self.home.geometry)[2]

    def release(self, sequence: S) -> None:
        """Gives up what the sequence holds. K and V in the loan are not cached anywhere."""
        if self.is_home(sequence):
            super().release(sequence)
        self._forget(sequence)

    def plan(self, batch: Batch[S], ahead: int = 0) -> tuple[Batch[S], ForwardPlan, OffloadedRows | None]:
        """Plans one decode step. If a sequence would have to come back when the step copies all that it may
        already, the step goes without it. No other step is planned until this one has ended or failed."""
        places = self._places([s for s, _ in batch])
        moves = self._begin_moves(places)
        at_home, elsewhere = places.staying_home + places.returning, places.staying_out + places.leaving
        home, lent = _step(self.home, at_home), _step(self.cache, elsewhere)
        self._step = lent if elsewhere else None
        # without offloaded rows the device may take its fastest way
        offloaded = OffloadedRows(lent, moves) if elsewhere or moves else None
        return [(s, 1) for s in at_home + elsewhere], home, offloaded

    def _places(self, sequences: list[S]) -> _Places[S]:
        """Decides which of these sequences the step computes at home and which elsewhere, and which move for
        that."""
        policy, form = self.policy, self.home.geometry
        at_home = [s for s in sequences if self.is_home(s)]
        urged = policy.urged(sequences)
        budget = CopyBudget(sum(map(policy.length, sequences)))
        blocks = self._spare(sequences)
        fitting, crowded_out, _ = policy.divide(sequences, blocks, form)
        crowded_out = [s for s in crowded_out if budget.takes(policy.length(s))]
        blocks -= sum(form.blocks(s.computed + 1) for s in crowded_out)
        called_back = policy.called_back(fitting, blocks, form, budget)
        leaving = policy.going(at_home, urged, fitting, budget)
        return _Places(
            staying_home=[s for s in at_home if s not in leaving],
            returning=crowded_out + called_back,
            staying_out=[s for s in fitting if s not in called_back],
            leaving=leaving,
        )

    def _begin_moves(self, places: _Places[S]) -> tuple[PageMove, ...]:
        """Takes room for the sequences that move. Returns the copies that the step makes for them. A sequence
        of which all is cached at home needs no copy, and is at home now."""
        self._moving, moves = [], list[PageMove]()
        directions = [(s, False) for s in places.returning] + [(s, True) for s in places.leaving]
        for sequence, out in directions:
            move = self._move(sequence, out=out)
            if move.tokens.size:
                self._moving.append((sequence, out))
                moves.append(move)
            else:
                self._arrived(sequence, out=out)
        return tuple(moves)

    def finish(
        self, job: Job, lost: str | None, valid: Mapping[int, int] | None = None
    ) -> tuple[set[int], list[S]]:
        """Ends the forward of a job. If something is lost the loan is over."""
        super().finish(job, lost, valid)
        if job.offloaded is None:
            return set(), []
        if lost is not None:
            void = set(self.policy.offloaded)
            gone = self._undo()
            self._ended(lost)
            return void, gone
        if self._step is not None:
            self.cache.end_forward(self._step)
            self.tokens += len(self._step.sequences)
            self.tokens_total += len(self._step.sequences)
        for sequence, out in self._moving:
            if out:  # cached for the next that begins like it, and for itself if the loan ends
                self.home.keep(sequence.id, sequence.tokens.list(), tail=True)
            self._arrived(sequence, out=out)
        self._step, self._moving = None, []
        return set(), []

    def fail(self, job: Job) -> list[S]:
        """Aborts the forward of a job that has failed. The loan is over too, because a task that nobody
        collects may still write to its blocks."""
        super().fail(job)
        if job.offloaded is None:
            return []
        gone = self._undo()
        self._ended("a step has failed")
        return gone

    @property
    def _available(self) -> int:
        """The blocks at home that are free or can be freed."""
        return self.home.pages.available * self.home.geometry.blocks_per_page

    def _spare(self, ready: Sequence[S]) -> int:
        """The blocks left at home once each ready sequence there has those for its next token."""
        return self._available - self.home.blocks_for_each(self.takers(ready), 1)

    def _undo(self) -> list[S]:
        """Forgets all offloaded sequences. Those on their way out are still at home; the others have no K and
        V any more, and are returned."""
        if self._step is not None:
            self.cache.abort_forward(self._step)
        leaving = {s.id for s, out in self._moving if out}
        for sequence, out in self._moving:
            if not out:
                self.home.remove_sequence(sequence.id)
        gone = [s for s in self.policy.offloaded.values() if s.id not in leaving]
        self._step, self._moving = None, []
        for sequence in list(self.policy.offloaded.values()):
            self._forget(sequence)
        for sequence in gone:
            self.home.add_sequence(sequence.id, sequence.salt)
        return gone

    def _arrived(self, sequence: S, *, out: bool) -> None:
        """Gives up what the sequence holds at the side that it has left."""
        if out:
            self.home.remove_sequence(sequence.id)
        else:
            self._forget(sequence)
        self.went, self.came = self.went + out, self.came + (not out)

    def _forget(self, sequence: S) -> None:
        """Gives up the sequence's pages of the loan, if it has any."""
        self.policy.forget(sequence)
        if self.policy.offloaded.pop(sequence.id, None) is not None:
            self.cache.remove_sequence(sequence.id)

    def _move(self, sequence: S, *, out: bool) -> PageMove:
        """Takes room at the side to which the sequence goes; it keeps its room at the other side until the
        step has ended. At home it begins with those of its tokens that are cached there."""
        id_, count, width = sequence.id, sequence.computed, self.cache.geometry.tokens_per_block
        target, found = self.cache if out else self.home, 0
        if out:
            self.policy.offloaded[id_] = sequence
            target.add_sequence(id_)
        else:
            tokens = sequence.tokens.list()
            found = target.adopt(id_, tokens, count, salt=sequence.salt, whole_pages=True)
        if count > found:
            target.prepare_receive(id_, count - found)
            target.commit_receive(id_, count - found)
        firsts = np.arange(found, count, width, dtype=np.int32)
        pages = (np.array(cache.page_list(id_), np.int32) for cache in (self.home, self.cache))
        home, lent = (each[firsts // width] for each in pages)
        return PageMove(home, lent, np.minimum(width, count - firsts).astype(np.int32), out)


def _step(cache: ModelCache, sequences: list[S]) -> ForwardPlan:
    if sequences:
        return cache.begin_forward([s.id for s in sequences], [1] * len(sequences))
    return replace(ForwardPlan.none(cache.model, cache.pages.map), versions=cache.pages.versions)
