"""Speculative decoding: a decode job verifies tokens that were drafted for some of its sequences.

Each drafted token is a row of the step, after the sequence's own last token and the drafts before it. A draw
is a function of the seed, the index and the logits, so the draws of these rows are those that single steps
would have made, as long as the drafts before them were right. At the first wrong draft the sequence goes on
with the draw that should have stood there. So nothing of a stream tells that tokens were drafted.

Nothing is drafted for a sequence with a guide, whose grammar would have to step ahead, and for one that is
sent to a peer. No sequence of a step drafts if one of them shares the page of its next token, which is then
copied; if the model borrows from another unit; beside prompts in a mixed job; or if blocks for drafts are not
free. No sequence is preempted to make room for drafts.

Drafts come from the n-grams of a sequence's own text, or from a smaller model of the unit, the draft model
(`DraftModel`). The model that verifies them is the target model (`_TargetModel`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from kvloom.engine.batching.job_times import WEIGHT_READ_TOKENS
from kvloom.engine.batching.view import UnitView
from kvloom.engine.decoding.draft_model import DraftModel, draft_state_of
from kvloom.engine.drafts.drafting import DraftState
from kvloom.engine.drafts.lengths import Acceptance, LossBudget, StepTimes, best_lengths
from kvloom.engine.drafts.ngrams import SIZES, NgramIndex
from kvloom.engine.inflight import InflightBatch, Proposal
from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.sequence import Sequence as OneSequence
from kvloom.types.errors import ConfigError
from kvloom.types.job import JobResult, Phase
from kvloom.types.spec import MOST_DRAFTED, MOST_ROWS, EngineSpec

MOST_STEPS_UNLOOKED: Final = 8  # decode steps before drafts are looked for again
_MOST_IN_A_ROW: Final = 64  # steps with drafts before one without, by which it is seen whether they pay still
_LARGEST_BACKLOG: Final = WEIGHT_READ_TOKENS
"""The most tokens that the draft model may have to compute first, for each token that is left to make. A
draft step costs about as much as computing so many tokens, because it reads the weights. So if more are
lacking, to compute them would cost more than drafting all tokens that are left could save."""


class Speculation:
    """Decides which tokens are drafted for the models of a unit that are to speculate, and learns from how
    many of them were right."""

    def __init__(self, queues: Mapping[str, ModelQueue], spec: EngineSpec) -> None:
        """Raises ConfigError if a draft model is not on the unit, or has another vocabulary than its target
        model."""
        if spec.draft_problem is not None:
            raise ConfigError(spec.draft_problem)
        self._targets = dict[str, _TargetModel]()
        for model in spec.models:
            if model.speculation != "none" and queues[model.name].card.task == "generate":
                queue = queues[model.name]
                drafter = DraftModel.of(queues[model.draft], queue.card) if model.draft else None
                self._targets[model.name] = _TargetModel(queue, drafter)

    def drafts(
        self, queue: ModelQueue, ready: Sequence[OneSequence], view: UnitView, free: int
    ) -> Proposal | None:
        """Returns what is drafted for a decode step of `ready`; None if it does not pay. free: blocks that
        the step may take. If a model drafts, its forward has begun, and ends by `note_verified` or
        `failed`."""
        target = self._targets.get(queue.card.name)
        return None if target is None else target.drafts(ready, view, free)

    def take_steps(self, queue: ModelQueue, steps: int) -> int:
        """Returns how many of the steps a job takes before drafts are looked for again: a few, or as many as
        all its sequences still back off. Counts them as steps for which nothing was looked for."""
        target = self._targets.get(queue.card.name)
        if target is None or steps == 1 or target.rests(len(queue.running)):
            return steps
        if target.plain_step_due:
            return 1
        known = [sequence.draft_state for sequence in queue.running if sequence.draft_state is not None]
        idle = min((one.backoff_left for one in known), default=0) if len(known) == len(queue.running) else 0
        steps = min(steps, max(MOST_STEPS_UNLOOKED, 1 + idle))
        for one in known:
            one.note_steps(steps - 1)  # the first one was counted when drafts were looked for
        return steps

    def note_verified(self, inflight: InflightBatch, counted: Mapping[int, int], result: JobResult) -> None:
        """Learns from a job that has ended. counted: see `InflightBatch.accepted_only`."""
        target = self._targets.get(inflight.job.model)
        if target is not None and inflight.job.phase is Phase.DECODE:
            target.note_verified(inflight, counted, result)

    def failed(self, inflight: InflightBatch) -> None:
        """Forgets what was drafted in a job that has failed."""
        target = self._targets.get(inflight.job.model)
        if target is not None and target.drafter is not None and inflight.job.draft_steps is not None:
            target.drafter.failed(inflight.job.draft_steps)


class _TargetModel:
    """A target model: its decode steps verify what is drafted for its sequences."""

    def __init__(self, queue: ModelQueue, drafter: DraftModel | None) -> None:
        """queue: the target model's; drafter: the model that drafts for it; None if n-grams do."""
        self._queue = queue
        self.drafter = drafter
        self._times = StepTimes()
        self._budgets = defaultdict[int, LossBudget](LossBudget)
        self._in_a_row = 0  # steps with drafts since the last one without
        self._rates = [Acceptance() for _ in (SIZES if drafter is None else (1,))]

    def rests(self, rows: int) -> bool:
        """Returns whether nothing is drafted for so many sequences, because drafts have cost too much of
        late."""
        return self._budget(rows).spent

    def _budget(self, rows: int) -> LossBudget:
        """Returns the budget of steps of about so many sequences. Each power of two has its own, because what
        drafts bring in small batches must not pay for what they cost in large ones."""
        return self._budgets[rows.bit_length()]

    @property
    def plain_step_due(self) -> bool:
        """Whether a step without drafts is due, after many in a row that had some, so that it stays known how
        long such a step takes."""
        return self._in_a_row >= _MOST_IN_A_ROW

    def drafts(self, ready: Sequence[OneSequence], view: UnitView, free: int) -> Proposal | None:
        queue, rows = self._queue, len(ready)
        if (
            not 0 < rows < MOST_ROWS
            or not queue.planner.multi_step
            or self.rests(rows)
            or self.plain_step_due
        ):
            return None
        found = {sequence: drafted for sequence in ready if (drafted := self._proposed(sequence))}
        if not found or queue.cache.shares_a_tail([sequence.id for sequence in ready]):
            return None
        lengths, pays = self._lengths(found, rows)
        needs = sum(queue.cache.blocks_for(s.id, 1 + lengths.get(s, 0)) for s in ready) if lengths else 0
        if not lengths or needs > free:
            return None
        tokens = {sequence.id: found[sequence][:length] for sequence, length in lengths.items()}
        if self.drafter is None:
            return Proposal(tokens)
        steps = self.drafter.begin(lengths, min(self.drafter.room(view), free) - needs)
        self.drafter.count(paid=pays, tried=not pays and steps is not None)
        if steps is None:
            return None
        return Proposal({one.sequence: tokens[one.sequence] for one in steps.sequences if one.count}, steps)

    def _lengths(
        self, found: Mapping[OneSequence, list[int]], rows: int
    ) -> tuple[dict[OneSequence, int], bool]:
        """Returns how many drafted tokens are to be tried for each sequence, and whether some of them are
        expected to pay. found: the tokens that were drafted for some of the `rows` sequences."""
        drafter, most = self.drafter, min(MOST_ROWS - rows, sum(map(len, found.values())))
        seconds = self._times.expected(rows, rows + most)
        each = 0.0 if drafter is None else drafter.seconds(len(found), seconds[0], self._queue)
        candidates = [(draft_state_of(sequence).rate, len(drafted)) for sequence, drafted in found.items()]
        lengths = best_lengths(candidates, seconds, rows, each)
        taken, left = dict[OneSequence, int](), MOST_ROWS - rows - sum(lengths)
        for sequence, length in zip(found, lengths, strict=True):
            state = draft_state_of(sequence)
            if length:
                state.note_paid()
                taken[sequence] = length
                continue
            if drafter is None:
                state.leave_untried(found[sequence], sequence.tokens.length)
                continue
            may_try = not taken and drafter.may_try(sequence)
            trial = min(left, state.note_unpaid(len(found[sequence]), may_try=may_try))
            if trial:
                taken[sequence] = trial
        return taken, any(lengths)

    def _proposed(self, sequence: OneSequence) -> list[int]:
        """Returns the tokens that are drafted for a sequence, up to its end, after which none would count. If
        a model is to draft them, it returns as many zeros."""
        state = sequence.draft_state
        if sequence.guide or sequence.transfer or (state is not None and state.tick_backoff()):
            return []
        tokens, limit = sequence.tokens, self._queue.card.context_length
        if self.drafter is not None:
            limit = min(limit, self.drafter.context_length)
        most = min(MOST_DRAFTED, sequence.remaining - 1, limit - tokens.length - 1)
        if most < 1:
            return []
        if state is None:
            state = sequence.draft_state = self._first_state(sequence)
        if self.drafter is not None:
            worth = self.drafter.lacking(sequence) <= _LARGEST_BACKLOG * sequence.remaining
            return [0] * most if worth else []
        assert state.index is not None
        self._learn(state, *state.compare(tokens))
        drafted, state.kind = state.index.draft(tokens, most)
        state.note_look(len(drafted))
        ends = sequence.sampling.stop_token_ids
        return next((drafted[:i] for i, token in enumerate(drafted) if token in ends), drafted)

    def _first_state(self, sequence: OneSequence) -> DraftState:
        """Returns the draft state of a sequence for which nothing was drafted yet."""
        rates = [rate.prior() for rate in self._rates]
        if self.drafter is not None:
            cached = self.drafter.cached(sequence)
            explores = self.drafter.next_explores(likely=self._rates[0].likely)
            return DraftState(rates, draft_model_tokens=cached, explores=explores, trial_due=explores)
        most = sequence.prompt_length + sequence.sampling.max_tokens
        return DraftState(rates, NgramIndex(min(self._queue.card.context_length, most)))

    def note_verified(self, inflight: InflightBatch, counted: Mapping[int, int], result: JobResult) -> None:
        job, rows, steps = inflight.job, len(inflight.batch), max(1, inflight.steps(result))
        if inflight.tokens == rows and job.draft_steps is None:  # nothing was drafted
            self._in_a_row = 0
            self._budget(rows).earn(steps)
            if self.drafter is not None:
                self.drafter.note_steps(steps)
        else:  # a job that verifies drafts has one step
            plain = self._times.typical(rows, result.seconds)
            made = sum(counted.get(sequence.id, 1) for sequence, _ in inflight.batch)
            self._in_a_row += 1
            self._budget(rows).note(result.seconds / plain if plain else 0.0, made / rows)
        self._times.note(inflight.tokens, (result.seconds - result.draft_seconds) / steps)
        for sequence, count in inflight.batch:
            if count > 1 and not sequence.over:
                right = counted[sequence.id] - 1
                self._learn(draft_state_of(sequence), right, count - 1)
                self._queue.stats.drafted_tokens += count - 1
                self._queue.stats.accepted_tokens += right
        if self.drafter is not None and job.draft_steps is not None:
            self.drafter.ended(job.draft_steps, inflight.batch, counted, result.draft_seconds)

    def _learn(self, state: DraftState, right: int, drafted: int) -> None:
        """Takes note of how many of a sequence's drafts were right, or would have been."""
        if drafted:
            state.note_verified(right, drafted)
            self._rates[state.kind].note(right, drafted)
