"""A job: one prefill step or one decode step of one model, or both in one, as the executor receives it, with
the memory plan of its forward, which the accounting makes once and every layer reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import numpy as np

from kvloom.types.geometry import I32, I64, U32, Geometry
from kvloom.types.request import ModelCard, SamplingParams, TokenLogprob
from kvloom.types.spec import AdapterSpec
from kvloom.types.transfer import PageCopies


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A copy of the first `tokens` tokens of page `source` to page `target`, in all layers and heads."""

    source: int
    target: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """The pages that a forward reads and writes. B sequences append N tokens in all."""

    model: str
    sequences: tuple[int, ...]  # B ids, in batch order
    appends: I64  # [B] tokens that each sequence appends; their sum is N
    starts: I64  # [B] tokens that each sequence already holds
    page_map: I32  # [pages, layers, kv_heads] blocks; the rows of these sequences do not change meanwhile
    tables: I32  # [B, P] page ids, padded with 0
    positions: I64  # [N] position of each new token in its sequence
    slot_page: I32  # [N] page to which the K and V of each new token go
    slot_offset: I32  # [N] place in that page
    copies: tuple[PageCopy, ...] = ()  # done before any layer runs (copy on write)
    sends: tuple[PageCopies, ...] = ()  # done after each layer's write
    # [pages] a number that changes with a page's row of page_map, for a holder of a copy; None: not counted
    versions: I64 | None = None
    ahead: int = 0  # tokens that `tables` has pages for in each sequence, if more than it appends

    @staticmethod
    def none(model: str, page_map: I32) -> ForwardPlan:
        """Returns the plan of a forward without sequences."""
        words, ids = np.zeros(0, np.int64), np.zeros(0, np.int32)
        return ForwardPlan(model, (), words, words, page_map, ids.reshape(0, 1), words, ids, ids)

    def part(self, tokens: I64, *, first: bool) -> ForwardPlan:
        """Returns the plan of a forward over some tokens of this one, each of which is a row of its own, by
        their numbers. If it is the `first` such forward, it does the copies."""
        return replace(
            self,
            sequences=tuple(self.sequences[i] for i in tokens.tolist()),
            appends=self.appends[tokens],
            starts=self.starts[tokens],
            tables=self.tables[tokens],
            positions=self.positions[tokens],
            slot_page=self.slot_page[tokens],
            slot_offset=self.slot_offset[tokens],
            copies=self.copies if first else (),
        )


@dataclass(frozen=True, slots=True)
class PageMove:
    """A copy of the first tokens[i] tokens of page home[i] to page lent[i] of a loan, in all layers and
    heads; the way back if not `out`. All arrays are [n]."""

    home: I32
    lent: I32
    tokens: I32
    out: bool


@dataclass(frozen=True, slots=True)
class OffloadedRows:
    """The rows of a decode step, after those at home, for which another unit attends."""

    plan: ForwardPlan
    """The plan over the loan's blocks. Each sequence appends one token."""
    moves: tuple[PageMove, ...] = ()
    """The copies that come before the step, in this order."""


class Phase(StrEnum):
    """The kind of a job: it computes prompts, or one more token of each sequence, or both in one forward, of
    which the sequences that decode are the first."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def parts(self) -> tuple[Phase, ...]:
        """Returns the phases as which such a job counts."""
        return (Phase.PREFILL, Phase.DECODE) if self is Phase.MIXED else (self,)


def _no_tokens() -> I64:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A token to draw. `key` and `index` alone decide the draw's randomness."""

    row: int  # of the forward's tokens; several draws may share a row (n > 1)
    key: int
    index: int
    params: SamplingParams
    # Penalties read the prompt and the output; both are views that nobody writes to.
    prompt: I64 = field(default_factory=_no_tokens)
    output: I64 = field(default_factory=_no_tokens)
    # Returns a bit mask over the vocabulary, 32 tokens a word. The job calls it, because a grammar is slow.
    allowed: Callable[[], U32] | None = None


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt token whose log-probability is wanted: that of `token` after the forward's token `row`."""

    row: int
    token: int
    top: int


@dataclass(frozen=True, slots=True)
class DraftedSequence:
    """A sequence of a decode job for which a smaller model drafts."""

    sequence: int
    """The sequence's id."""
    known: I64
    """The sequence's tokens of which the smaller model has no K and V: at least the last one, which is not
    drafted."""
    count: int
    """The number of tokens to draft; 0 if the smaller model is only to have K and V of these."""
    places: tuple[I64, ...] = ()
    """Arrays [count] that take the drafts: parts of the job's `tokens` and of its draws' outputs."""

    @property
    def computed(self) -> int:
        """Returns the number of tokens that the smaller model computes: all but the last draft, which nothing
        follows."""
        return self.known.size + max(0, self.count - 1)


@dataclass(frozen=True, slots=True)
class DraftSteps:
    """Decode steps of a smaller model that come before the step of a decode job, and draft for it: in each
    the most likely token follows.

    The first step takes `known` of all sequences, and each later one the draft before it."""

    model: str
    plan: ForwardPlan
    """The plan over all tokens that are computed, sequence by sequence, each a row of its own."""
    sequences: tuple[DraftedSequence, ...]

    @property
    def steps(self) -> int:
        """Returns the number of steps."""
        return max(1, *(one.count for one in self.sequences))

    def step(self, number: int, share: int) -> tuple[Job, I64]:
        """Returns the forward of one step as a job that draws nothing, and the rows of it after which a draft
        comes, whose sequences are those that `take` fills. The drafts before it are in their places."""
        rows, tokens, ends = list[I64](), list[I64](), list[int]()
        first = size = 0
        for one in self.sequences:
            if number == 0:
                rows.append(np.arange(first, first + one.known.size))
                tokens.append(one.known)
            elif one.count > number:
                rows.append(np.array([first + one.known.size + number - 1]))
                tokens.append(one.places[0][number - 1 : number])
            size = sum(map(len, rows))
            if one.count > number:
                ends.append(size - 1)
            first += one.computed
        plan = self.plan.part(np.concatenate(rows), first=number == 0)
        job = Job(self.model, Phase.DECODE, share, plan, np.concatenate(tokens), ())
        return job, np.array(ends, np.int64)

    def take(self, number: int, drafts: I64) -> None:
        """Puts the drafts of one step into their places."""
        for one, draft in zip((s for s in self.sequences if s.count > number), drafts.tolist(), strict=True):
            for place in one.places:
                place[number] = draft


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Job:
    """One prefill step of a model, one or several decode steps, or one of both.

    Each step of a decode job gives every sequence a token and reads the token that the step before it has
    drawn. `tokens`, `samples` and `plan` are the first step's. No draw of a job of several steps reads
    `output` or `allowed`.
    """

    model: str
    phase: Phase
    share: int  # units of the device's compute that are this job's own until it ends
    plan: ForwardPlan
    tokens: I64  # [N] input ids
    samples: tuple[SampleRow, ...]
    prompts: tuple[PromptRow, ...] = ()
    steps: int = 1
    offloaded: OffloadedRows | None = None  # rows after those of `plan` for which another unit attends
    rows: int = 0  # of a mixed job: sequences that decode, the first of the batch
    # The adapter of each sequence, "" for the model itself; empty if no sequence has one.
    adapters: tuple[str, ...] = ()
    # An executor with `lookahead` calls it on the event loop with the tokens of each step but the last.
    on_step: Callable[[Job, list[int]], None] | None = None
    # Of a job of a model that makes vectors, for each text the position from which its tokens are the second
    # text of a pair; 0 if it is none. Such a job has whole texts, draws nothing, and has no pages.
    pairs: tuple[int, ...] = ()
    # Steps that come before that of a decode job, and put what they draft into `tokens`.
    draft_steps: DraftSteps | None = None

    @property
    def kept(self) -> I64:
        """Returns the rows [R] whose logits are wanted: first those of the draws, then those of the prompt's
        tokens."""
        rows = [row.row for row in self.samples] + [row.row for row in self.prompts]
        return np.asarray(rows, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job."""

    tokens: list[int]  # one id for each sample row, step by step
    logprobs: list[TokenLogprob | None]  # likewise; None for draws that did not ask for it
    prompt_logprobs: list[TokenLogprob]
    seconds: float  # on the device
    lost: str | None = None  # why the offloaded rows have no output; their tokens mean nothing then
    vectors: list[bytes] = field(default_factory=list)  # one for each text of a job with `pairs`
    draft_seconds: float = 0.0  # of `seconds`, those of `Job.draft_steps`


class WeightMemory(Protocol):
    """The weights of a unit's models, which share one budget with its pool. Each model's are asleep at first:
    they take disk or page cache only."""

    @property
    def blocks(self) -> Mapping[str, int]:
        """The blocks of the pool that each model's weights take the place of while they are awake."""

    def make_room(self, blocks: I32) -> None:
        """Gives the memory of these blocks of the arena up. What they hold is lost."""

    def take_back(self, blocks: I32) -> None:
        """Undoes `make_room` for these blocks: whoever writes to them from here on has memory for it."""

    def wake(self, model: str) -> asyncio.Future[bool]:
        """Reads the next part of a model's weights, its first layers first, beside running jobs. Returns
        whether that was the last part; jobs of the model may run from the first one on. Raises OSError from
        the future if they cannot be read."""

    def sleep(self, model: str) -> None:
        """Lets go of a model's weights, of which no job runs. The next `wake` reads the first part."""


@dataclass(frozen=True, slots=True)
class ProvenAdapter:
    """An adapter that was read, and fits its base."""

    digest: str  # of what it computes with
    blocks: int  # of the pool that its weights take the place of while they are in memory


class AdapterMemory(Protocol):
    """The adapters of a unit's models. The weights of each are in memory from `read` to `drop`."""

    @property
    def proven(self) -> Mapping[str, ProvenAdapter]:
        """The adapters that the unit was started with. Some of them are in memory."""

    @property
    def here(self) -> Collection[str]:
        """The adapters that are in memory."""

    def read(self, base: str, adapter: AdapterSpec) -> asyncio.Future[ProvenAdapter]:
        """Reads an adapter from its folder and proves it, beside running jobs. Raises ConfigError from the
        future if it cannot be served; then it is not in memory."""

    def check(self, base: str, adapter: AdapterSpec) -> asyncio.Future[ProvenAdapter]:
        """Returns what an adapter's folder holds now, which changes nothing. Raises ConfigError from the
        future if that cannot be served."""

    def drop(self, adapter: str) -> None:
        """Lets go of an adapter's weights, if they are in memory. Jobs that run keep what they need."""

    def make_room(self, blocks: I32) -> None:
        """Does what `WeightMemory.make_room` does."""


class Executor(Protocol):
    """A device that runs jobs.

    `launch` returns at once. Several jobs run at the same time while their shares fit in `compute`. A job
    that fails raises from its future and leaves the executor fit for the next one.
    """

    @property
    def compute(self) -> int:
        """The units of compute to share out: cores of a CPU, multiprocessors of a GPU."""

    @property
    def cards(self) -> dict[str, ModelCard]: ...

    @property
    def geometries(self) -> dict[str, Geometry]: ...

    @property
    def blocks(self) -> int:
        """The number of blocks in the arena."""

    @property
    def max_steps(self) -> int:
        """The largest number of steps that a decode job may take."""

    @property
    def lookahead(self) -> int:
        """The number of steps of a job that may have begun beside the one whose tokens come next.

        Above 0, a job of several steps has the blocks for all of them at its start (`ForwardPlan.ahead`) and
        passes the tokens of each step to `Job.on_step`, so that one of them may end a sequence; the rows
        drawn after that mean nothing. At 0, all tokens come with the result.
        """

    @property
    def weights(self) -> WeightMemory | None:
        """The weights that can sleep; None if all stay."""

    @property
    def adapters(self) -> AdapterMemory | None:
        """The adapters of the models; None if the device serves none."""

    def launch(self, job: Job) -> asyncio.Future[JobResult]:
        """Starts a job and returns its result's future."""

    def steps_begun(self, job: Job) -> int:
        """Returns the number of steps of a job that have begun, or that it took if it has just ended."""

    def cut(self, job: Job) -> None:
        """Ends a running job of several steps after those that have begun."""
