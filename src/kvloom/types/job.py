"""A job: one prefill step or one decode step of one model, as the executor receives it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np

from kvloom.types.geometry import I64, U32, Geometry
from kvloom.types.plan import ForwardPlan, OffloadedRows
from kvloom.types.request import ModelCard, SamplingParams, TokenLogprob


class Phase(StrEnum):
    """The kind of a job: it computes prompts, or one more token of each sequence."""

    PREFILL = "prefill"
    DECODE = "decode"


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


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Job:
    """One prefill step of a model, or one or several decode steps.

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
    # An executor with `lookahead` calls it on the event loop with the tokens of each step but the last.
    on_step: Callable[[Job, list[int]], None] | None = None

    @property
    def kept(self) -> I64:
        """[R] rows whose logits are wanted: first those of the draws, then those of the prompt's tokens."""
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

    def launch(self, job: Job) -> asyncio.Future[JobResult]:
        """Starts a job and returns its result's future."""

    def steps_begun(self, job: Job) -> int:
        """Returns the number of steps of a job that have begun, or that it took if it has just ended."""

    def cut(self, job: Job) -> None:
        """Ends a running job of several steps after those that have begun."""
