"""The draft model: a smaller model of the unit that drafts for a larger one, the target model.

Its steps are a part of the target model's decode job (`DraftSteps`), so that policies, quotas and preemption
know of nothing new. While such a job runs, a sequence of the draft model's cache, with the id of the target
model's, holds the K and V that it reads and writes. Between two jobs these are a cached prefix like any other
that was used last: they give way if somebody wants the blocks and nothing older is left, and nothing is to be
given back if the sequence ends, is preempted or moves. What has given way, and a prompt at first, is computed
again beside the target model's steps, a few tokens at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from kvloom.engine.batching.view import UnitView
from kvloom.engine.drafts.drafting import DraftState
from kvloom.engine.drafts.lengths import StepTimes
from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.sequence import Sequence as OneSequence
from kvloom.types.errors import ConfigError, OutOfBlocks
from kvloom.types.job import DraftedSequence, DraftSteps
from kvloom.types.request import ModelCard
from kvloom.types.spec import MOST_ROWS

_LONGEST_GAP: Final = 64  # new sequences, of which one explores if drafts do not pay
_FIRST_WAIT: Final = 16  # steps without drafts before a trial of those that do not pay
_LONGEST_WAIT: Final = 64
_MOST_LACKING: Final = 2 * _LONGEST_WAIT
"""Tokens that may be computed for a trial. A sequence comes to lack fewer between two trials of its own."""


class DraftModel:
    """A model that drafts for one target model."""

    def __init__(self, queue: ModelQueue) -> None:
        """queue: the draft model's own, in which its own requests run."""
        self._queue = queue
        self._times = StepTimes()
        self._gap = 1  # one new sequence in so many may compute its whole prompt for a trial
        self._left = 0  # new sequences that come before one may do so again
        self._wait = _FIRST_WAIT  # steps without drafts from the next trial to the one after it
        self._until_trial = _FIRST_WAIT  # steps without drafts before the next trial

    @classmethod
    def of(cls, queue: ModelQueue, target: ModelCard) -> DraftModel:
        """Returns the model of `queue` as the draft model of `target`. Raises ConfigError if their tokens are
        not the same."""
        card, key = queue.card, f"models.{target.name}.speculation"
        if card.task != "generate":
            raise ConfigError(f"{key}: {card.name} makes vectors of texts; a model that generates is right")
        if card.vocab_size != target.vocab_size:
            raise ConfigError(
                f"{key}: {card.name} has {card.vocab_size} tokens and {target.name} {target.vocab_size}; a "
                "model with the same vocabulary is right"
            )
        if card.tokenizer != target.tokenizer and _vocabulary(card) != _vocabulary(target):
            raise ConfigError(
                f"{key}: {card.name} and {target.name} have unlike tokenizers; a model with the same one is "
                "right"
            )
        return cls(queue)

    @property
    def context_length(self) -> int:
        return self._queue.card.context_length

    def seconds(self, sequences: int, step: float, target: ModelQueue) -> float:
        """Returns the seconds that a draft step of so many sequences is expected to take: as measured, or if
        none was measured, from the numbers of parameters and the seconds of a step of the target model."""
        unseen = step * self._queue.card.parameters / max(1, target.card.parameters)
        return self._times.expected(sequences, sequences, unseen)[0]

    def cached(self, sequence: OneSequence) -> int:
        """Returns the tokens of a sequence whose K and V this model has already."""
        tokens = sequence.tokens.list()
        return self._queue.cache.prefixes.length(tokens, len(tokens) - 1, sequence.salt)

    def lacking(self, sequence: OneSequence) -> int:
        """Returns the number of a sequence's tokens that are to be computed before more can be drafted, as
        far as is known: it is not known which K and V have given way since."""
        return sequence.tokens.length - draft_state_of(sequence).draft_model_tokens

    def may_try(self, sequence: OneSequence) -> bool:
        """Returns whether drafts of a sequence may be tried though they do not pay. One that explores may.
        Of those for which drafts have paid one at a time may when a trial is due, if few tokens are to be
        computed for it first: to draft for one takes nearly as long as to draft for all, so trials of each
        would slow down a large batch."""
        state = draft_state_of(sequence)
        due = self._until_trial <= 0 and state.has_paid
        return state.explores or (due and self.lacking(sequence) <= _MOST_LACKING)

    def note_steps(self, steps: int) -> None:
        """Takes note of steps without drafts."""
        self._until_trial -= steps

    def next_explores(self, *, likely: bool) -> bool:
        """Returns whether a sequence that begins may compute a long prompt for a trial. While drafts do not
        pay, fewer and fewer may, and the fewest if it is known that drafts are likely to be right: trials
        tell whether they would pay again."""
        if self._left:
            self._left -= 1
            return False
        self._gap = _LONGEST_GAP if likely else min(2 * self._gap, _LONGEST_GAP)
        self._left = self._gap - 1
        return True

    def count(self, *, paid: bool, tried: bool) -> None:
        """Takes note of a step's drafts: whether they are expected to pay, or are a trial that begins."""
        if paid:
            self._gap, self._wait = 1, _FIRST_WAIT
        if tried:
            self._until_trial, self._wait = self._wait, min(2 * self._wait, _LONGEST_WAIT)

    def room(self, view: UnitView) -> int:
        """Returns the blocks that drafts may hold during a job: those that nobody wants, and no more than its
        quota leaves if quotas are walls."""
        own = self._queue.quota - self._queue.cache.used_blocks
        return min(view.unclaimed, own) if view.walls else view.unclaimed

    def begin(self, wanted: Mapping[OneSequence, int], room: int) -> DraftSteps | None:
        """Begins the steps that draft so many tokens for each sequence, in `room` blocks; None if they hold
        nothing. A sequence has no drafts yet if more tokens are to be computed for it first than there are
        rows."""
        cache, rows, found = self._queue.cache, MOST_ROWS, list[DraftedSequence]()
        for sequence in sorted(wanted, key=self.lacking):
            count = wanted[sequence]
            length = sequence.tokens.length
            need = cache.geometry.blocks(length + count) + cache.geometry.blocks_per_page  # one may be copied
            if not rows or need > room:
                continue
            held = cache.adopt(sequence.id, sequence.tokens.list(), length - 1, salt=sequence.salt)
            end = min(length, held + rows)
            known = sequence.tokens.between(held, end)
            if end < length:  # otherwise the steps that compute what it lacks would count as its trial
                draft_state_of(sequence).trial_due = True
            found.append(DraftedSequence(sequence.id, known, count if end == length else 0))
            room, rows = room - need, rows - known.size
        if not found:
            return None
        ids, counts = [one.sequence for one in found], [one.computed for one in found]
        try:
            plan = cache.begin_forward(ids, counts, by_token=True)
        except OutOfBlocks:  # the step goes on without drafts
            for one in found:
                cache.remove_sequence(one.sequence)
            return None
        return DraftSteps(self._queue.card.name, plan, tuple(found))

    def ended(
        self,
        draft_steps: DraftSteps,
        batch: Sequence[tuple[OneSequence, int]],
        counted: Mapping[int, int],
        seconds: float,
    ) -> None:
        """Caches the K and V that the draft steps of a job have computed, as far as the drafts were right.
        batch: the job's sequences; counted: see `InflightBatch.accepted_only`; seconds: of all steps."""
        cache = self._queue.cache
        right = {
            one.sequence: min(counted.get(one.sequence, 1), max(1, one.count)) - 1
            for one in draft_steps.sequences
        }
        kept = {one.sequence: one.known.size + right[one.sequence] for one in draft_steps.sequences}
        cache.end_forward(draft_steps.plan, kept)
        places = {one.sequence: one.places for one in draft_steps.sequences}
        for sequence, _ in batch:
            if sequence.id in kept:
                drafts = places[sequence.id][0][: right[sequence.id]].tolist() if right[sequence.id] else []
                draft_state_of(sequence).draft_model_tokens = cache.length(sequence.id)
                cache.keep(sequence.id, [*sequence.tokens.list(), *drafts], tail=True)
                cache.remove_sequence(sequence.id)
        known = sum(one.known.size for one in draft_steps.sequences)
        # Steps are not timed if they also computed a backlog: a prompt, or K and V that had been evicted.
        if known <= 2 * len(kept):
            self._times.note(len(kept), seconds / draft_steps.steps)

    def failed(self, draft_steps: DraftSteps) -> None:
        """Undoes `begin`."""
        self._queue.cache.abort_forward(draft_steps.plan)
        for one in draft_steps.sequences:
            self._queue.cache.remove_sequence(one.sequence)


def draft_state_of(sequence: OneSequence) -> DraftState:
    """Returns the draft state of a sequence for which drafts were looked for."""
    assert sequence.draft_state is not None
    return sequence.draft_state


def _vocabulary(card: ModelCard) -> object:
    """Returns the texts for which a tokenizer has tokens."""
    tokenizer = json.loads(card.tokenizer)
    return tokenizer.get("model"), tokenizer.get("added_tokens")
