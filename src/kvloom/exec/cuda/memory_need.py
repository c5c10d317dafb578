"""The device memory that jobs need beside weights and pool.

It is measured as vLLM's `profile_run` does it: the largest jobs run before the pool is taken. If `kv_memory`
is `auto`, a unit has the device alone, so all that the driver has less counts: also kernels, handles and
workspaces of libraries, of which torch's allocator knows nothing. If it has a size, others may be on the
device, so only what torch has taken counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvloom.exec.cuda.model import DeviceModel
from kvloom.types.geometry import I64
from kvloom.types.job import ForwardPlan, Job, Phase, PromptRow, SampleRow
from kvloom.types.request import MOST_LOGPROBS, SamplingParams

_BENT: Final = SamplingParams(
    max_tokens=1,
    seed=0,
    temperature=1.0,
    logit_bias={0: 0.0},
    logprobs=MOST_LOGPROBS,
    prompt_logprobs=MOST_LOGPROBS,
)
"""The parameters of a draw that takes as much memory as any: one in which the host has a say."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The bytes that jobs take, and how each model's jobs run."""

    kept: int
    """Bytes that stay taken: inputs, recordings, workspaces of libraries, and kernels."""
    running: int
    """Bytes that jobs take only while they run, summed over the jobs that run at the same time."""
    plain: frozenset[str] = frozenset()
    """The models whose steps cannot be recorded."""
    flash: frozenset[str] = frozenset()
    """The models for which FlashAttention attends."""

    @property
    def total(self) -> int:
        return self.kept + self.running

    def __str__(self) -> str:
        return (
            f"jobs need {self.total:,} ({self.kept:,} for inputs, recordings and libraries, {self.running:,} "
            "for those that run at the same time)"
        )


def largest_jobs(name: str, model: DeviceModel, rows: int, chunk: int) -> tuple[Job, Job]:
    """Returns the two jobs of a model that take the most memory. One is a prefill of `chunk` tokens with the
    log-probability of each, of so many sequences that its tables are the largest; the other is a decode step
    of `rows` sequences. `rows` tokens are drawn after each. They write K and V nowhere."""
    prompts = tuple(PromptRow(row, 0, MOST_LOGPROBS) for row in range(chunk))
    last = tuple(SampleRow(chunk - 1, key, 0, _BENT) for key in range(rows))
    each = tuple(SampleRow(row, row, 0, _BENT) for row in range(rows))
    # as FlashAttention takes them, they have one more, which is padding
    most = max(range(1, min(rows, chunk) + 1), key=lambda count: (count + 1) * model.widest(count + 1))
    prompt = _plan(name, model, most, chunk, model.widest(most + 1))
    step = _plan(name, model, rows, rows, model.geometry.pages(model.card.context_length))
    return (
        Job(name, Phase.PREFILL, 0, prompt, _zeros(chunk), last, prompts),
        Job(name, Phase.DECODE, 0, step, _zeros(rows), each),
    )


def _plan(name: str, model: DeviceModel, sequences: int, tokens: int, pages: int) -> ForwardPlan:
    """Returns a plan of sequences that together append so many tokens, each but the first one token, with
    tables of so many pages."""
    geometry, appends = model.geometry, np.ones(sequences, dtype=np.int64)
    appends[0] += tokens - sequences
    return ForwardPlan(
        name,
        tuple(range(sequences)),
        appends=appends,
        starts=_zeros(sequences),
        page_map=np.zeros((1, geometry.layers, geometry.kv_heads), dtype=np.int32),
        tables=np.zeros((sequences, pages), dtype=np.int32),
        positions=np.concatenate([np.arange(count) for count in appends]),
        slot_page=np.full(tokens, -1, dtype=np.int32),
        slot_offset=np.zeros(tokens, dtype=np.int32),
    )


def _zeros(count: int) -> I64:
    return np.zeros(count, dtype=np.int64)
