"""Speculative decoding: a decode job verifies tokens that were drafted for some of its sequences.

Each drafted token is a row of the step, after the sequence's own last token and the drafts before it. A draw
is a function of the seed, the index and the logits, so the draws of these rows are those that single steps
would have made, as long as the drafts before them were right: the first wrong one is where the sequence goes
on by the draw that should have stood there. So nothing of a stream tells that tokens were drafted.

A sequence drafts only if its next draws read nothing but its tokens: none with a guide, whose grammar would
have to step ahead, and none that is sent to a peer. No sequence of a model drafts while one of the step
shares the page of its next token (so that it is copied), while the model borrows from another unit, beside
prompts in a mixed job, or if blocks for drafts are not free: no sequence is preempted for a draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kvloom.engine.drafts.drafting import Drafting, first_rates
from kvloom.engine.drafts.lengths import RowTimes, best_lengths
from kvloom.engine.drafts.ngrams import NgramIndex
from kvloom.engine.inflight import InflightBatch
from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.sequence import Sequence as OneSequence
from kvloom.types.job import JobResult, Phase
from kvloom.types.spec import EngineSpec

MOST_DRAFTED: Final = 15  # tokens of a sequence in a step
MOST_ROWS: Final = 64  # of a step with drafts
PATIENCE: Final = 8  # steps that a job of a model that drafts takes at most


class Speculation:
    """Decides what is drafted for the models of a unit that are to speculate, and learns from what came of
    it."""

    def __init__(self, queues: Mapping[str, ModelQueue], spec: EngineSpec) -> None:
        wanted = {model.name for model in spec.models if model.speculation == "ngram"}
        self._models = {
            name: _ModelDrafts(queue)
            for name, queue in queues.items()
            if name in wanted and queue.card.task == "generate"
        }

    def drafts(self, queue: ModelQueue, ready: Sequence[OneSequence], free: int) -> dict[int, list[int]]:
        """Returns the tokens that are drafted for a decode step of `ready`, by the sequence's id; none for
        sequences for which it does not pay. free: blocks that the step may take."""
        model = self._models.get(queue.card.name)
        return {} if model is None else model.drafts(ready, free)

    def most_steps(self, queue: ModelQueue, steps: int) -> int:
        """Returns how many of the steps a job takes before drafts are looked for again."""
        model = self._models.get(queue.card.name)
        return steps if model is None or model.rests else min(steps, PATIENCE)

    def verified(self, inflight: InflightBatch, valid: Mapping[int, int], result: JobResult) -> None:
        """Learns from a job that has ended. valid: see `InflightBatch.verified`."""
        model = self._models.get(inflight.job.model)
        if model is not None and inflight.job.phase is Phase.DECODE and inflight.job.steps == 1:
            model.verified(inflight, valid, result.seconds)


class _ModelDrafts:
    """The drafts of one model's sequences."""

    def __init__(self, queue: ModelQueue) -> None:
        self._queue = queue
        self._times = RowTimes()
        self._rates = first_rates()
        self.rests = False
        """Whether no sequence of the last step looks for drafts for now."""

    def drafts(self, ready: Sequence[OneSequence], free: int) -> dict[int, list[int]]:
        queue, rows = self._queue, len(ready)
        most = min(MOST_ROWS, queue.max_running) - rows
        if most < 1 or not rows or not queue.planner.multi_step:
            return {}
        self.rests = all(one.drafting is not None and one.drafting.resting > 0 for one in ready)
        found = {sequence: drafted for sequence in ready if (drafted := self._found(sequence))}
        if not found or queue.cache.shares_a_tail([sequence.id for sequence in ready]):
            return {}
        most = min(most, sum(map(len, found.values())))
        offers = [(_drafting(sequence).rate, len(drafted)) for sequence, drafted in found.items()]
        lengths = best_lengths(offers, self._times.expected(rows, rows + most), rows)
        drafts = dict[int, list[int]]()
        for (sequence, drafted), length in zip(found.items(), lengths, strict=True):
            taken = length or _drafting(sequence).refused(len(drafted))
            if taken:
                drafts[sequence.id] = drafted[:taken]
        counts = [1 + len(drafts.get(sequence.id, ())) for sequence in ready]
        needs = (queue.cache.blocks_for(s.id, n) for s, n in zip(ready, counts, strict=True))
        return drafts if drafts and sum(needs) <= free else {}

    def _found(self, sequence: OneSequence) -> list[int]:
        """Returns what is drafted for a sequence, as far as it could count: nothing after its end does."""
        tokens, limit = sequence.tokens, self._queue.card.context_length
        most = min(MOST_DRAFTED, sequence.remaining - 1, limit - tokens.length - 1)
        if most < 1 or sequence.guide or sequence.transfer:
            return []
        if sequence.drafting is None:
            room = min(limit, sequence.prompt_length + sequence.sampling.max_tokens)
            sequence.drafting = Drafting(NgramIndex(room), [rate.heir() for rate in self._rates])
        drafting = sequence.drafting
        if drafting.resting:
            drafting.resting -= 1
            return []
        drafted, drafting.kind = drafting.index.draft(tokens, most)
        ends = sequence.sampling.stop_token_ids
        return next((drafted[:i] for i, token in enumerate(drafted) if token in ends), drafted)

    def verified(self, inflight: InflightBatch, valid: Mapping[int, int], seconds: float) -> None:
        self._times.note(inflight.tokens, seconds)
        for sequence, count in inflight.batch:
            if count > 1 and not sequence.over:
                right, drafting = valid[sequence.id] - 1, _drafting(sequence)
                drafting.verified(right, count - 1)
                self._rates[drafting.kind].note(right, count - 1)
                self._queue.stats.drafted_tokens += count - 1
                self._queue.stats.accepted_tokens += right


def _drafting(sequence: OneSequence) -> Drafting:
    assert sequence.drafting is not None
    return sequence.drafting
