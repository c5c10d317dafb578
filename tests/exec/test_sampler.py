"""Draws, penalties and masks against transformers' own processors and plain definitions, and the numbers and
log-probabilities that come with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvloom.exec.sampler import prompt_logprobs, sample
from kvloom.types.job import PromptRow, SampleRow
from tests.draws import F64, VOCAB, bent, draw, follows, ids, params, random_logits, rows, softmax


def oracle(logits: Tensor, processors: Sequence[Any]) -> F64:
    scores = LogitsProcessorList(processors)(torch.zeros((1, 1), dtype=torch.int64), logits[None].clone())
    probabilities: F64 = scores[0].double().softmax(-1).numpy()
    return probabilities


FILTERS: list[tuple[dict[str, float], list[Callable[[], Any]]]] = [
    ({"temperature": 1.0}, []),
    ({"temperature": 0.6}, [lambda: TemperatureLogitsWarper(0.6)]),
    ({"temperature": 3.0}, [lambda: TemperatureLogitsWarper(3.0)]),
    ({"temperature": 1.0, "top_k": 5}, [lambda: TopKLogitsWarper(5)]),
    ({"temperature": 1.0, "top_k": 1}, [lambda: TopKLogitsWarper(1)]),
    ({"temperature": 1.0, "top_k": 500}, []),
    ({"temperature": 1.0, "top_p": 0.7}, [lambda: TopPLogitsWarper(0.7)]),
    ({"temperature": 1.0, "top_p": 1e-6}, [lambda: TopPLogitsWarper(1e-6)]),
    ({"temperature": 1.0, "min_p": 0.1}, [lambda: MinPLogitsWarper(0.1)]),
    ({"temperature": 1.0, "min_p": 1.0}, [lambda: MinPLogitsWarper(1.0)]),
    (
        {"temperature": 1.5, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
        [
            lambda: TemperatureLogitsWarper(1.5),
            lambda: TopKLogitsWarper(12),
            lambda: TopPLogitsWarper(0.8),
            lambda: MinPLogitsWarper(0.05),
        ],
    ),
]


@pytest.mark.parametrize(("changes", "processors"), FILTERS, ids=[str(f[0]) for f in FILTERS])
def test_draws_follow_transformers_distribution(
    changes: dict[str, float], processors: list[Callable[[], Any]]
) -> None:
    for seed in range(2):
        logits = random_logits(seed)[0]
        wanted = oracle(logits, [make() for make in processors])
        assert follows(draw(logits, params(**changes)), wanted)


def test_the_check_itself_sees_a_wrong_distribution() -> None:
    logits = random_logits(0)[0]
    counts = draw(logits, params(temperature=1.0))
    assert not follows(counts, oracle(logits, [TemperatureLogitsWarper(0.9)]))
    assert not follows(counts, oracle(logits, [TopPLogitsWarper(0.95)]))


def test_a_low_temperature_is_greedy() -> None:
    logits = random_logits(3, 40)
    for temperature in (1e-30, 1e-6, 1e-3):
        cold, _ = sample(logits, rows(40, params(temperature=temperature)))
        assert cold == logits.argmax(-1).tolist()


def test_ties_go_to_the_lowest_id_and_draw_evenly() -> None:
    logits = torch.full((1, VOCAB), -3.0)
    logits[0, [7, 11, 19]] = 1.0
    assert sample(logits, rows(1, params()))[0] == [7]
    assert sample(logits, rows(1, params(logprobs=2)))[0] == [7]
    even = np.zeros(VOCAB)
    even[[7, 11, 19]] = 1 / 3
    assert follows(draw(logits[0], params(temperature=1.0, top_p=0.8)), even)
    first = np.zeros(VOCAB)
    first[[7, 11]] = 0.5  # exactly k are kept, the lowest ids of those that tie
    assert follows(draw(logits[0], params(temperature=1.0, top_k=2)), first)


def test_draws_depend_on_key_and_index_alone() -> None:
    kinds = [
        params(temperature=1.0),
        params(temperature=0.7, top_p=0.9),
        params(),
        params(temperature=2.0, top_k=9, min_p=0.02),
        params(temperature=1.0, presence_penalty=1.0),
        params(temperature=1.0, logprobs=3),
    ]
    logits = random_logits(4, 60)
    batch = [SampleRow(i, 77 + i // 10, i % 10, kinds[i % 6], ids(1), ids(2, 3)) for i in range(60)]
    together = sample(logits, batch)[0]
    alone = [sample(logits[i : i + 1], [batch[i]])[0][0] for i in range(60)]
    assert together == alone
    turned = torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist()
    assert sample(logits[turned], [batch[i] for i in turned])[0] == [together[i] for i in turned]
    seen = {
        tuple(sample(logits[:1].expand(30, -1), [SampleRow(0, key, i, kinds[0]) for i in range(30)])[0])
        for key in range(20)
    }
    assert len(seen) == 20  # other keys, other draws


@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.6}, {"min_p": 0.02}, {"top_k": 40}],
    ids=["plain", "cold", "min_p", "top_k"],
)
def test_logits_computed_again_draw_the_same_tokens(changes: dict[str, float]) -> None:
    """A context that is computed again has logits that differ by some 1e-6 of themselves: 40,000 draws among
    5,000 tokens, of which many are as near to each other as that, stay as they are."""
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(40, 5000, generator=generator) * 3.0
    again = logits * (1 + 1e-6 * (2 * torch.rand(logits.shape, generator=generator) - 1))
    assert not logits.argsort(-1).equal(again.argsort(-1))
    chosen = params(**({"temperature": 1.0} | changes))
    for index in range(1000):
        batch = [SampleRow(i, 31 * i, index, chosen) for i in range(40)]
        assert sample(logits, batch)[0] == sample(again, batch)[0]


def test_logits_may_lie_in_columns() -> None:
    """As those that are gathered from ranks do."""
    logits, chosen = random_logits(8, 4), params(temperature=1.0, top_p=0.9)
    assert sample(logits.T.contiguous().T, rows(4, chosen)) == sample(logits, rows(4, chosen))


def test_half_precision_logits() -> None:
    logits = random_logits(8, 4).to(torch.bfloat16)
    chosen = params(temperature=1.0, logprobs=1)
    assert sample(logits, rows(4, chosen))[0] == sample(logits.float(), rows(4, chosen))[0]


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
