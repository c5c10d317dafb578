"""Draws on the device, in Triton's interpreter: the same tokens as the host draws."""

from __future__ import annotations

import numpy as np
import torch

from kvloom.core.job import SampleRow
from kvloom.core.sampling import SamplingParams
from kvloom.kernels.triton import draw
from kvloom.model import sampler


def test_the_numbers_are_the_hosts() -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**64, 304, dtype=np.uint64)
    keys[300:] = 0, 1, 2**63, 2**64 - 1
    indices = np.append(rng.integers(0, 100_000, 300), [0, 0, 1, 2**31])
    got = draw.uniform(torch.tensor(keys.view(np.int64)), torch.tensor(indices))
    assert got.tolist() == sampler.uniform(keys.tolist(), indices.tolist()).tolist()


def test_the_tokens_are_the_hosts() -> None:
    kinds = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 0.0},
        {"temperature": 2.0, "top_k": 5, "min_p": 0.02},
        {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 1e-30},
    ]
    params = [SamplingParams(max_tokens=8, seed=0, **kinds[i % 6]) for i in range(60)]  # type: ignore[arg-type]
    torch.manual_seed(0)
    logits = torch.randn(60, 50) * 2
    logits[:6] = logits[:6].round()  # ties
    logits[6, 3:] = -torch.inf
    rows = [SampleRow(i, 2**64 - 1 - i, i % 7, params[i]) for i in range(60)]
    keys = torch.tensor(np.array([row.key for row in rows], np.uint64).view(np.int64))
    got = draw.sample(
        logits,
        keys,
        torch.tensor([row.index for row in rows]),
        torch.tensor([row.params.temperature for row in rows]),
        torch.tensor([row.params.top_k for row in rows]),
        torch.tensor([row.params.top_p for row in rows]),
        torch.tensor([row.params.min_p for row in rows]),
    )
    with torch.device("cpu"):
        assert got.tolist() == sampler.sample(logits.cpu(), rows)[0]
