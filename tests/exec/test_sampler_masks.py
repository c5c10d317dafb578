"""Tokens that a mask or min_tokens makes impossible."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvloom.exec.sampler import sample
from kvloom.types.job import SampleRow
from tests.draws import VOCAB, draw, follows, params, random_logits, rows, softmax


def mask(allowed: Sequence[int], words: int = 1) -> Callable[[], npt.NDArray[np.uint32]]:
    out = np.zeros(words, dtype=np.uint32)
    for token in allowed:
        out[token // 32] |= np.uint32(1 << token % 32)
    return lambda: out


def test_masks() -> None:
    logits = random_logits(2)[0]
    allowed = [0, 5, 23]
    counts = draw(logits, params(temperature=1.0), allowed=mask(allowed))
    wanted = np.zeros(VOCAB)
    wanted[allowed] = softmax(logits[allowed].double().numpy())
    assert follows(counts, wanted)
    greedy, _ = sample(logits[None], rows(1, params(), allowed=mask(allowed)))
    assert greedy == [max(allowed, key=lambda t: float(logits[t]))]
    wide = torch.zeros(1, 70)
    wide[0, 69] = 9.0
    assert sample(wide, rows(1, params(), allowed=mask([64], 3)))[0] == [64]
    assert sample(wide, rows(1, params(), allowed=mask([31])))[0] == [
        31
    ]  # words that are missing allow nothing


def test_stop_tokens_are_impossible_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4] = 50.0, 40.0
    for temperature in (0.0, 1.0):
        chosen = params(min_tokens=2, stop_token_ids=(3,), temperature=temperature)
        found = [sample(logits, [SampleRow(0, 1, index, chosen)])[0][0] for index in range(4)]
        assert found == [4, 4, 3, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_row_that_allows_nothing_spares_the_others(temperature: float) -> None:
    """A grammar at its end and min_tokens contradict each other: the grammar wins. A mask that allows nothing
    at all still leaves the neighbours their tokens."""
    logits = random_logits(1, 3)
    both = params(temperature=temperature, min_tokens=9, stop_token_ids=(6,))
    plain = params(temperature=temperature)
    batch = [
        SampleRow(0, 1, 0, plain),
        SampleRow(1, 2, 0, both, allowed=mask([6])),
        SampleRow(2, 3, 0, plain, allowed=mask([])),
    ]
    tokens, _ = sample(logits, batch)
    assert tokens[0] == sample(logits[:1], [batch[0]])[0][0]
    assert tokens[1] == 6
    assert 0 <= tokens[2] < VOCAB
