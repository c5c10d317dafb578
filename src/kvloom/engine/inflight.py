"""Jobs under way: makes a job of sequences, and passes its results on to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np

from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.requests import Requests
from kvloom.engine.sequence import Sequence
from kvloom.types.geometry import I64
from kvloom.types.job import DraftSteps, ForwardPlan, Job, JobResult, Phase, PromptRow, SampleRow
from kvloom.types.request import PromptEvent, TokenEvent, TokenLogprob


@dataclass(frozen=True, slots=True, eq=False)
class InflightBatch:
    """A job under way, with its sequences."""

    job: Job
    batch: list[tuple[Sequence, int]]
    """The sequences, each with the number of tokens that it appends."""
    drawers: list[Sequence]
    """The sequence of each sample row."""
    asked: list[Sequence]
    """The sequence of each prompt row."""

    @property
    def prompt_tokens(self) -> int:
        """Returns the tokens of prompts that the job computes."""
        if self.job.phase is Phase.DECODE:
            return 0
        return sum(count for _, count in self.batch[self.job.rows :])

    @property
    def tokens(self) -> int:
        """Returns the tokens that the job computes, or one step of it."""
        return sum(count for _, count in self.batch)

    def accepted_only(self, result: JobResult) -> tuple[InflightBatch, JobResult, dict[int, int]]:
        """Returns the batch and its result without rejected drafts, and for each sequence id how many drawn
        tokens count (accepted drafts + 1). If nothing was drafted, batch and result are as they were, and
        there are no numbers.

        A sequence's draws count up to the first one that differs from the draft in its place, or ends the
        sequence. If a sequence is over, and so has no drafts any more, its first draw counts alone.
        """
        if self.job.phase is not Phase.DECODE or self.tokens == len(self.batch):
            return self, result, {}
        counted, kept, at = dict[int, int](), list[int](), 0
        for sequence, count in self.batch:
            drawn, tried = result.tokens[at : at + count - 1], self.job.tokens[at + 1 : at + count].tolist()
            same = takewhile(_goes_on(sequence), zip(drawn, tried, strict=True))
            right = counted[sequence.id] = 1 if sequence.over else 1 + sum(1 for _ in same)
            kept += range(at, at + right)
            at += count
        less = replace(
            self,
            batch=[(sequence, counted[sequence.id]) for sequence, _ in self.batch],
            drawers=[self.drawers[i] for i in kept],
        )
        tokens, logprobs = [result.tokens[i] for i in kept], [result.logprobs[i] for i in kept]
        return less, replace(result, tokens=tokens, logprobs=logprobs), counted

    def without(self, ids: set[int], result: JobResult) -> tuple[InflightBatch, JobResult]:
        """Returns the batch and its result without these sequences, for a job of one step."""
        drawn = [i for i, sequence in enumerate(self.drawers) if sequence.id not in ids]
        less = replace(
            self,
            batch=[(sequence, n) for sequence, n in self.batch if sequence.id not in ids],
            drawers=[self.drawers[i] for i in drawn],
        )
        tokens, logprobs = [result.tokens[i] for i in drawn], [result.logprobs[i] for i in drawn]
        return less, replace(result, tokens=tokens, logprobs=logprobs)

    def steps(self, result: JobResult) -> int:
        """Returns the number of steps that the job took."""
        return len(result.tokens) // len(self.drawers) if self.job.steps > 1 else 1

    def drawn(self, result: JobResult) -> int:
        """Returns the number of tokens that are still to be counted: all, or those of the last step if each
        step was reported."""
        if self.job.on_step is None:
            return len(result.tokens)
        return sum(not drawer.over for drawer in self.drawers)


def _goes_on(sequence: Sequence) -> Callable[[tuple[int, int]], bool]:
    """Returns whether a drawn token equals the draft that was tried, and does not end the sequence."""
    ends = sequence.sampling.stop_token_ids
    return lambda both: both[0] == both[1] and both[0] not in ends


@dataclass(frozen=True, slots=True)
class Proposal:
    """The drafts that a decode job of one step tries."""

    tokens: dict[int, list[int]]
    """Drafts of each sequence, by id. If a model drafts, zeros of the right length: the job overwrites them
    before its own step."""
    steps: DraftSteps | None = None
    """The steps of the draft model; None if n-grams drafted."""

    def placed(self, places: Mapping[int, tuple[I64, ...]]) -> DraftSteps | None:
        """Returns the draft steps, which write the drafted tokens into these places of each sequence."""
        if self.steps is None:
            return None
        each = (replace(one, places=places.get(one.sequence, ())) for one in self.steps.sequences)
        return replace(self.steps, sequences=tuple(each))


def compose(
    queue: ModelQueue,
    phase: Phase,
    share: int,
    batch: list[tuple[Sequence, int]],
    steps: int = 1,
    on_step: Callable[[Job, list[int]], None] | None = None,
    drafts: Proposal | None = None,
) -> InflightBatch:
    """Plans one job and describes it. Raises OutOfBlocks, with nothing changed, if the pool is short.

    batch: the sequences with the tokens that they append; in a mixed job those that decode are the first.

    steps: of a decode job. on_step: as in `Job`, for a job that has the blocks for all its steps at once.
    drafts: of a decode job of one step.
    """
    if queue.card.task != "generate":
        return _compose_texts(queue, share, batch)
    if phase is Phase.DECODE:
        batch, plan, offloaded = queue.planner.plan(batch, steps if on_step else 0)
    else:
        plan = queue.cache.begin_forward([s.id for s, _ in batch], [n for _, n in batch])
        offloaded = None
    decoding = sum(1 for _ in takewhile(lambda one: one[0].decodes, batch)) if phase is Phase.MIXED else 0
    tokens: list[I64] = []
    total = 0
    samples: list[SampleRow] = []
    prompts: list[PromptRow] = []
    drawers: list[Sequence] = []
    asked: list[Sequence] = []
    places = dict[int, tuple[int, I64]]()  # of drafts: the first row, and the outputs that draws read
    for sequence, count in batch:
        sequence.in_job = True
        rows = sequence.prompt_rows(count, total)
        prompts += rows
        asked += [sequence] * len(rows)
        if drafts and sequence.id in drafts.tokens:
            tried = np.asarray(drafts.tokens[sequence.id], np.int64)
            tokens += [sequence.tokens.between(sequence.computed, sequence.tokens.length), tried]
            drawers += [sequence] * count
            samples += sequence.draft_rows(total, tried)
            places[sequence.id] = total + 1, samples[-1].output[sequence.output_length :]
            total += count
            continue
        tokens.append(sequence.tokens.between(sequence.computed, sequence.computed + count))
        total += count
        if count == sequence.pending and sequence.draws:
            for drawer in (sequence, *sequence.siblings):
                drawers.append(drawer)
                samples.append(drawer.sample_row(total - 1))
    inputs = np.concatenate(tokens)
    drawn, name = (tuple(samples), tuple(prompts)), queue.card.name
    owners = drawers if drafts else [sequence for sequence, _ in batch]
    adapters = tuple("" if sequence.model == name else sequence.model for sequence in owners)
    job = Job(
        name,
        phase,
        share,
        plan,
        inputs,
        *drawn,
        steps,
        offloaded,
        decoding,
        adapters if any(adapters) else (),
        on_step,
        draft_steps=drafts.placed(_arrays(places, inputs)) if drafts else None,
    )
    return InflightBatch(job, batch, drawers, asked)


def _arrays(places: Mapping[int, tuple[int, I64]], inputs: I64) -> dict[int, tuple[I64, ...]]:
    """Returns the arrays that take each sequence's drafts: a part of the job's inputs, and the outputs."""
    return {one: (inputs[first : first + output.size], output) for one, (first, output) in places.items()}


def _compose_texts(queue: ModelQueue, share: int, batch: list[tuple[Sequence, int]]) -> InflightBatch:
    """Describes a job that makes a vector of each text."""
    for sequence, _ in batch:
        sequence.in_job = True
    name = queue.card.name
    plan = replace(
        ForwardPlan.none(name, queue.cache.pages.map),
        sequences=tuple(sequence.id for sequence, _ in batch),
        appends=np.array([count for _, count in batch], np.int64),
        starts=np.zeros(len(batch), np.int64),
    )
    tokens = np.concatenate([sequence.tokens.prompt for sequence, _ in batch])
    pairs = tuple(sequence.pair for sequence, _ in batch)
    return InflightBatch(Job(name, Phase.PREFILL, share, plan, tokens, (), pairs=pairs), batch, [], [])


class OutputProcessor:
    """Passes the results of jobs on to sequences and streams."""

    def __init__(self, queues: Mapping[str, ModelQueue], requests: Requests) -> None:
        self._queues = queues
        self._requests = requests

    def begin(self, batch: list[tuple[Sequence, int]]) -> None:
        """Lets the callers of sequences that have been admitted know that a job with them begins. batch:
        sequences, each with its tokens in the job."""
        for sequence, _ in batch:
            if sequence.new_here and (stream := self._requests.stream(sequence.request)):
                stream.begin()
            sequence.new_here = False

    def process(self, inflight: InflightBatch, result: JobResult, jobs: int) -> None:
        """Processes the result of a job that has ended well. jobs: how many the unit has started."""
        queue = self._queues[inflight.job.model]
        if inflight.job.pairs:
            self._process_texts(queue, inflight, result)
            return
        for asker, report in zip(inflight.asked, result.prompt_logprobs, strict=True):
            self._report_prompt(asker, report)
        drawn = len(inflight.drawers)
        self._process_earlier(inflight, result.tokens[: len(result.tokens) - drawn])
        for i, (sequence, count) in enumerate(inflight.batch):
            sequence.in_job = False
            sequence.computed += count
            if sequence.transfer:
                sequence.transfer.advance(sequence.computed)
            if sequence.pending == 0:
                if i >= inflight.job.rows and inflight.job.phase is not Phase.DECODE:
                    queue.cache.keep(sequence.id, sequence.tokens.list())
                siblings, sequence.siblings = sequence.siblings, []
                for sibling in siblings:
                    if not sibling.over:
                        queue.fork(sequence, sibling, jobs)
            if sequence.over:
                self._requests.release(queue, sequence)
            elif sequence.pending == 0 and not sequence.draws:
                self._requests.end(sequence, "length")
        last = (
            zip(inflight.drawers, result.tokens[-drawn:], result.logprobs[-drawn:], strict=True)
            if drawn
            else ()
        )
        for drawer, token, logprob in last:
            if not drawer.over:
                self._requests.append(drawer, token, logprob)
        self._requests.deferred.run()

    def _process_texts(self, queue: ModelQueue, inflight: InflightBatch, result: JobResult) -> None:
        for (sequence, count), vector in zip(inflight.batch, result.vectors, strict=True):
            sequence.in_job = False
            sequence.computed += count
            if sequence.over:
                self._requests.release(queue, sequence)
            else:
                self._requests.end(sequence, "stop", vector=vector)
        self._requests.deferred.run()

    def process_step(self, inflight: InflightBatch, tokens: list[int]) -> bool:
        """Processes one step of a job that goes on. Returns whether a sequence of the job has ended: nobody
        sees what is drawn for that one from here on, though its K and V may be cached."""
        stats = self._queues[inflight.job.model].stats
        stats.output_tokens += sum(not drawer.over for drawer in inflight.drawers)
        for drawer, token in zip(inflight.drawers, tokens, strict=True):
            drawer.computed += 1
            if drawer.over:
                drawer.tokens.append(token)
            else:
                self._requests.append(drawer, token, None)
        return any(drawer.over for drawer in inflight.drawers)

    def _process_earlier(self, inflight: InflightBatch, tokens: list[int]) -> None:
        """Processes the tokens of all steps but the last, as far as `process_step` has not. They end no
        sequence."""
        each = len(inflight.drawers)
        for i, drawer in enumerate(inflight.drawers if tokens else ()):
            own = tokens[i::each][drawer.output_length - inflight.job.samples[i].index :]
            index = drawer.output_length
            drawer.tokens.extend(own)
            drawer.computed += len(own)
            if not drawer.over:
                stream = self._requests.stream(drawer.request)
                assert stream is not None
                stream.extend([TokenEvent(drawer.choice, at, token) for at, token in enumerate(own, index)])

    def lose(self, inflight: InflightBatch, kept: InflightBatch, lost: list[Sequence], jobs: int) -> None:
        """Undoes a step for the sequences that are not in `kept`. Those of `lost` have no K and V any more
        and are computed again; the others are as they were before the step."""
        queue, kept_ids = self._queues[inflight.job.model], {s.id for s, _ in kept.batch}
        for sequence, _ in inflight.batch:
            if sequence.id not in kept_ids:
                sequence.in_job = False
                if sequence.over:
                    self._requests.release(queue, sequence)
        for sequence in lost:
            if not sequence.over:
                queue.put_back(sequence, jobs, "the unit that attended for it is gone, and its K and V")

    def fail(self, inflight: InflightBatch, error: BaseException, jobs: int) -> None:
        """Ends the requests of a job that has failed; all other requests go on, and so do those that decoded
        beside prompts: one of these may be to blame."""
        queue, mixed = self._queues[inflight.job.model], inflight.job.phase is Phase.MIXED
        blamed = inflight.batch[inflight.job.rows :] if mixed else inflight.batch
        for sequence, _ in inflight.batch:
            sequence.in_job = False
            if sequence.over:
                self._requests.release(queue, sequence)
        for sequence, _ in inflight.batch[: len(inflight.batch) - len(blamed)]:
            if not sequence.over:
                queue.put_back(sequence, jobs, f"a job failed that it shared ({type(error).__name__})")
        message = f"the job failed ({type(error).__name__}); the engine's log has more"
        for sequence, _ in blamed:
            if not sequence.over:
                self._requests.cancel(sequence.request, "error", message)
        self._requests.deferred.run()

    def _report_prompt(self, sequence: Sequence, logprob: TokenLogprob) -> None:
        sequence.prompt_logprobs.append(logprob)
        if len(sequence.prompt_logprobs) < sequence.prompt_length - 1:
            return
        stream = self._requests.stream(sequence.request)
        if stream and sequence in stream.sequences:  # it may have ended, but not all choices with it
            stream.add(PromptEvent(sequence.prompt_logprobs))
