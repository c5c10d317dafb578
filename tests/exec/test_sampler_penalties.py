"""Penalties and bias, against transformers' own processor and plain definitions."""

from __future__ import annotations

import numpy as np
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from kvloom.exec.sampler import sample
from kvloom.types.job import SampleRow
from tests.draws import VOCAB, bent, draw, follows, ids, params, random_logits, softmax


def test_repetition_penalty_is_transformers_own() -> None:
    for seed in range(40):
        logits = random_logits(seed)
        prompt, output = [seed % VOCAB, 3, 3], [(seed * 5) % VOCAB, 7]
        for penalty in (0.5, 1.3, 20.0):
            wanted = RepetitionPenaltyLogitsProcessor(penalty)(
                torch.tensor([prompt + output]), logits.clone()
            )
            row = SampleRow(0, 1, 0, params(repetition_penalty=penalty), ids(*prompt), ids(*output))
            assert sample(logits, [row])[0] == wanted.argmax(-1).tolist()


def test_penalties_and_bias_by_their_definitions() -> None:
    generator = np.random.default_rng(5)
    for seed in range(200):
        chosen = params(
            presence_penalty=float(generator.uniform(-2, 2)),
            frequency_penalty=float(generator.uniform(-2, 2)),
            repetition_penalty=float(generator.uniform(0.5, 2)),
            logit_bias={int(t): float(generator.uniform(-5, 5)) for t in generator.integers(0, VOCAB, 3)},
        )
        prompt, output = (
            generator.integers(0, VOCAB, n).tolist() for n in (6, int(generator.integers(0, 9)))
        )
        logits = random_logits(seed)
        tokens, _ = sample(logits, [SampleRow(0, 1, len(output), chosen, ids(*prompt), ids(*output))])
        assert tokens == [int(bent(logits[0], chosen, prompt, output).argmax())]


def test_a_draw_sees_the_bent_logits() -> None:
    logits = random_logits(9)[0]
    chosen = params(
        temperature=1.0, presence_penalty=1.5, frequency_penalty=0.5, logit_bias={4: 2.0, 5: -100.0}
    )
    output = [1, 1, 2]
    counts = draw(logits, chosen, output=ids(*output))
    assert follows(counts, softmax(bent(logits, chosen, [], output)))
    assert counts[5] == 0
