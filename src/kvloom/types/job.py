"""A job: one prefill step or one decode step of one model, as the executor receives it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np

from kvloom.types.geometry import I64, U32, Geometry
from kvloom.types.plan import OffloadedRows, Plan
from kvloom.types.request import ModelCard, SamplingParams, TokenLogprob


class Phase(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


def _no_tokens() -> I64:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One token to draw. `row` counts the forward's tokens; several draws may share a row (n > 1).

    `key` and `index` alone decide the draw's randomness. `prompt` and `output`, which penalties read, are
    views that nobody writes to. `allowed` gives a bit mask over the vocabulary, 32 tokens a word, and is
    called in the job, because a grammar may take its time.
    """

    row: int
    key: int
    index: int
    params: SamplingParams
    prompt: I64 = field(default_factory=_no_tokens)
    output: I64 = field(default_factory=_no_tokens)
    allowed: Callable[[], U32] | None = None


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt token whose log-probability is wanted: that of `token` after the forward's token `row`."""

    row: int
    token: int
    top: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Job:
    """`share` units of the device's compute are this job's own until it ends. tokens: [N] input ids.

    A decode job may take several `steps`, each of which gives every sequence a token and reads the one that
    the step before it has drawn; `tokens`, samples and plan are the first step's. No draw of such a job reads
    `output` or `allowed`. offloaded: rows after those of `plan` for which another unit attends. told: called
    on the loop with this job and the tokens of each step but the last, as they come, by an executor that is
    `ahead`.
    """

    model: str
    phase: Phase
    share: int
    plan: Plan
    tokens: I64
    samples: tuple[SampleRow, ...]
    prompts: tuple[PromptRow, ...] = ()
    steps: int = 1
    offloaded: OffloadedRows | None = None
    told: Callable[[Job, list[int]], None] | None = None

    @property
    def kept(self) -> I64:
        """[R] rows whose logits are wanted: those of the draws, then those of the prompt's tokens."""
        rows = [row.row for row in self.samples] + [row.row for row in self.prompts]
        return np.asarray(rows, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class JobResult:
    """tokens: one id a sample row, step by step; logprobs likewise, None where not asked for. seconds: on the
    device. lost: why there is no output for the offloaded rows, whose tokens mean nothing."""

    tokens: list[int]
    logprobs: list[TokenLogprob | None]
    prompt_logprobs: list[TokenLogprob]
    seconds: float
    lost: str | None = None


class Executor(Protocol):
    """Runs jobs. `launch` returns at once; several jobs run at the same time while their shares fit in
    `compute`. A job that fails raises from its future and leaves the executor fit for the next one."""

    @property
    def compute(self) -> int:
        """Units of compute to share out: cores of a CPU, multiprocessors of a GPU."""

    @property
    def cards(self) -> dict[str, ModelCard]: ...

    @property
    def geometries(self) -> dict[str, Geometry]: ...

    @property
    def blocks(self) -> int:
        """Blocks in the arena."""

    @property
    def stride(self) -> int:
        """The most steps that a decode job may take."""

    @property
    def ahead(self) -> int:
        """Steps of a job that may have begun beside the one whose tokens come next. Above 0 a job of several
        has the blocks for all of them at its start (`Plan.ahead`) and tells each step's tokens, so that one
        of them may end a sequence; the rows drawn after that mean nothing. At 0 all come with the result."""

    def launch(self, job: Job) -> asyncio.Future[JobResult]: ...

    def taken(self, job: Job) -> int:
        """Steps of a job of several, with those that are under way; all that it took where it has just
        ended."""

    def cut(self, job: Job) -> None:
        """Let a running job of several steps end after those that are under way."""
