"""Draws, against transformers' own processors, and the numbers behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvloom.exec.sampler import sample, uniform
from kvloom.types.job import SampleRow
from tests.draws import F64, VOCAB, draw, follows, ids, params, random_logits, rows


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


def test_the_numbers_are_splitmix64() -> None:
    def mixed(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    pairs = [(key, index) for key in (0, 1, 2**63, 2**64 - 1) for index in (0, 1, 10_000)]
    found = uniform([key for key, _ in pairs], [index for _, index in pairs])
    wanted = [(mixed((mixed(k) + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11) * 2.0**-53 for k, i in pairs]
    assert found.tolist() == wanted
    # Along a key, across keys, and from one to the next: even, and without relation.
    for keys, indices in ((np.zeros(20_000), np.arange(20_000)), (np.arange(20_000), np.zeros(20_000))):
        u = uniform(keys.astype(np.uint64).tolist(), indices.astype(np.uint64).tolist())
        assert follows(np.histogram(u, 50, (0, 1))[0], np.full(50, 1 / 50))
        assert abs(float(np.corrcoef(u[1:], u[:-1])[0, 1])) < 0.03


def test_half_precision_logits() -> None:
    logits = random_logits(8, 4).to(torch.bfloat16)
    chosen = params(temperature=1.0, logprobs=1)
    assert sample(logits, rows(4, chosen))[0] == sample(logits.float(), rows(4, chosen))[0]
