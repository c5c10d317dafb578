"""Log-probabilities that the sampler reports."""

from __future__ import annotations

import pytest
import torch

from kvloom.exec.sampler import prompt_logprobs, sample
from kvloom.types.job import PromptRow, SampleRow
from tests.draws import ids, params, random_logits


def test_logprobs_are_the_models_own() -> None:
    logits = random_logits(6, 3)
    chosen = params(temperature=0.3, top_k=3, logprobs=4, repetition_penalty=3.0, logit_bias={2: 9.0})
    batch = [SampleRow(i, i, 0, chosen, ids(1, 2), ids(3)) for i in range(3)]
    tokens, reports = sample(logits, batch)
    normal = logits.double().log_softmax(-1)
    for i, (token, report) in enumerate(zip(tokens, reports, strict=True)):
        assert report is not None
        assert report.logprob == pytest.approx(float(normal[i, token]), abs=1e-5)
        best = normal[i].topk(4)
        assert [one for one, _ in report.top] == best.indices.tolist()
        assert [value for _, value in report.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    mixed = [batch[0], SampleRow(1, 1, 0, params()), SampleRow(2, 2, 0, params(logprobs=0))]
    reports = sample(logits, mixed)[1]
    assert [None if r is None else len(r.top) for r in reports] == [4, None, 0]
    asked = prompt_logprobs(logits, [PromptRow(0, 5, 0), PromptRow(1, 6, 2), PromptRow(2, 7, 20)])
    assert [r.logprob for r in asked] == pytest.approx([float(normal[i, 5 + i]) for i in range(3)], abs=1e-5)
    assert [len(r.top) for r in asked] == [0, 2, 20]


def test_more_alternatives_than_there_are_tokens() -> None:
    """Asking for them must not fail the batch."""
    reports = sample(torch.zeros(1, 5), [SampleRow(0, 1, 0, params(logprobs=20))])[1]
    assert [None if report is None else len(report.top) for report in reports] == [5]
