"""A job under way, with the sequences it is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvloom.core.arrays import I64
from kvloom.core.job import Job, JobResult, Phase, PromptRow, SampleRow
from kvloom.core.weaving import Away
from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """batch: sequences with the tokens each appends. drawers: the sequence that each sample is for; asked:
    the sequence of each prompt row."""

    job: Job
    batch: list[tuple[Sequence, int]]
    drawers: list[Sequence]
    asked: list[Sequence]

    def without(self, ids: set[int], result: JobResult) -> tuple[Flight, JobResult]:
        """As if these sequences had not been in a job of one step."""
        drawn = [i for i, sequence in enumerate(self.drawers) if sequence.id not in ids]
        less = replace(
            self,
            batch=[(sequence, n) for sequence, n in self.batch if sequence.id not in ids],
            drawers=[self.drawers[i] for i in drawn],
        )
        tokens, logprobs = [result.tokens[i] for i in drawn], [result.logprobs[i] for i in drawn]
        return less, replace(result, tokens=tokens, logprobs=logprobs)

    def steps(self, result: JobResult) -> int:
        """That it took."""
        return len(result.tokens) // len(self.drawers) if self.job.steps > 1 else 1

    def drawn(self, result: JobResult) -> int:
        """Tokens that come with its result; those that were told of step by step have been counted."""
        if self.job.told is None:
            return len(result.tokens)
        return sum(not drawer.cancelled for drawer in self.drawers)


def compose(
    queue: ModelQueue,
    phase: Phase,
    share: int,
    batch: list[tuple[Sequence, int]],
    steps: int = 1,
    told: Callable[[Job, list[int]], None] | None = None,
) -> Flight:
    """Plan and describe one job. steps: of a decode job. told: as in `Job`, of one that has the blocks for
    all its steps at once. Raises OutOfBlocks, with nothing changed, where the pool is short."""
    away: Away | None = None
    if queue.woven is not None and phase is Phase.DECODE:
        batch, plan, away = queue.woven.plan(batch, queue.spare)
        if not (away.plan.sequences or away.moves):
            away = None  # the device may take its fastest way
    else:
        ahead = steps if told else 0
        plan = queue.cache.begin_forward([s.id for s, _ in batch], [n for _, n in batch], ahead)
    tokens: list[I64] = []
    total = 0
    samples: list[SampleRow] = []
    prompts: list[PromptRow] = []
    drawers: list[Sequence] = []
    asked: list[Sequence] = []
    for sequence, count in batch:
        sequence.in_job = True
        rows = sequence.prompt_rows(count, total)
        prompts += rows
        asked += [sequence] * len(rows)
        tokens.append(sequence.tokens.between(sequence.computed, sequence.computed + count))
        total += count
        if count == sequence.pending and sequence.draws:
            for drawer in (sequence, *sequence.siblings):
                drawers.append(drawer)
                samples.append(drawer.sample_row(total - 1))
    inputs = np.concatenate(tokens)
    job = Job(queue.card.name, phase, share, plan, inputs, tuple(samples), tuple(prompts), steps, away, told)
    return Flight(job, batch, drawers, asked)
