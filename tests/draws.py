"""Rows to draw tokens for, and whether the tokens drawn follow a distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvloom.exec.sampler import sample
from kvloom.types.job import SampleRow
from kvloom.types.request import SamplingParams

VOCAB = 24
DRAWS = 6000
F64 = npt.NDArray[np.float64]


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 8, "seed": 0} | changes))


def rows(count: int, chosen: SamplingParams, **fields: Any) -> list[SampleRow]:
    return [SampleRow(i, 1000 + i, i % 7, chosen, **fields) for i in range(count)]


def ids(*tokens: int) -> npt.NDArray[np.int64]:
    return np.array(tokens, dtype=np.int64)


def random_logits(seed: int, count: int = 1) -> Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2.0


def draw(logits: Tensor, chosen: SamplingParams, **fields: Any) -> npt.NDArray[np.int64]:
    """How often each token comes in DRAWS draws from logits [V]."""
    tokens, _ = sample(logits.expand(DRAWS, -1), rows(DRAWS, chosen, **fields))
    return np.bincount(tokens, minlength=len(logits))


def follows(counts: npt.NDArray[np.int64], probabilities: F64) -> bool:
    """Pearson's chi-square within five standard deviations; nothing impossible was drawn."""
    possible = probabilities > 0
    expected = probabilities[possible] * counts.sum()
    rare = expected < 5
    found, wanted = counts[possible], expected
    if rare.any():  # pooled, so that every cell is large enough
        found = np.append(found[~rare], found[rare].sum())
        wanted = np.append(wanted[~rare], wanted[rare].sum())
    chi = float((((found - wanted) ** 2) / np.maximum(wanted, 1e-9)).sum())
    freedom = max(1, len(wanted) - 1)
    return not counts[~possible].any() and chi < freedom + 5 * (2 * freedom) ** 0.5


def softmax(values: F64) -> F64:
    weights = np.exp(values - values.max())
    total: F64 = weights / weights.sum()
    return total


def bent(logits: Tensor, chosen: SamplingParams, prompt: list[int], output: list[int]) -> F64:
    """Repetition, then OpenAI's formula μ − c·frequency − (c > 0)·presence over the output, then the bias."""
    out = logits.double().numpy().copy()
    for token in {*prompt, *output}:
        factor = chosen.repetition_penalty
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token in range(len(out)):
        count = output.count(token)
        out[token] -= count * chosen.frequency_penalty + (count > 0) * chosen.presence_penalty
        out[token] += chosen.logit_bias.get(token, 0.0)
    return out
