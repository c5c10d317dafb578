"""The stand-ins have the published percentiles and means; prompts and answers may be long together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvloom.lab.workload.lengths import coupled
from kvloom.lab.workload.spec import Lengths
from kvloom.types.errors import ConfigError
from kvloom.types.geometry import I64

COUNT = 200_000
# stand-in, side: mean, then percentiles; the tolerance of a percentile
PUBLISHED = [
    ("sharegpt", 0, 161, {}, 0.03),
    ("sharegpt", 1, 338, {}, 0.03),
    ("sharegpt-gpt4", 0, 306, {50: 74, 80: 348, 95: 1484, 99: 3388}, 0.03),
    ("sharegpt-gpt4", 1, 500, {50: 487, 80: 781, 95: 988, 99: 1234}, 0.03),
    ("burstgpt", 0, 830, {50: 582, 80: 1427, 95: 2345, 99: 3549}, 0.03),
    ("burstgpt", 1, 271, {50: 243, 80: 434, 95: 669, 99: 964}, 0.03),
    ("azure-conversation", 0, 1155, {25: 396, 50: 1020, 80: 1315, 90: 2734, 95: 4083, 99: 4142}, 0.03),
    ("azure-conversation", 1, 211, {25: 85, 50: 129, 80: 400, 90: 424, 95: 451, 99: 601}, 0.03),
    ("chatlmsys", 0, 100, {}, 0.03),
    ("chatlmsys", 1, 261, {}, 0.03),
    # published are percentiles of 10,000 draws; those of zipf-s lie 34 tokens apart
    ("zipf-s", 0, 128, {50: 35, 80: 103, 95: 401, 99: 1678}, 0.09),
    ("zipf-m", 0, 256, {50: 30, 80: 168, 95: 1285, 99: 4536}, 0.05),
    ("zipf-l", 1, 512, {50: 53, 80: 596, 95: 3122, 99: 5241}, 0.05),
]


def lengths(**settings: object) -> Lengths:
    return Lengths.model_validate(settings)


@pytest.mark.parametrize(("name", "side", "mean", "percentiles", "tolerance"), PUBLISHED)
def test_a_stand_in_is_what_it_stands_for(
    name: str, side: int, mean: float, percentiles: dict[int, int], tolerance: float
) -> None:
    tokens = lengths(prompt=name, output=name).draw(np.random.default_rng(1), COUNT)[:, side]
    assert tokens.min() >= 1
    assert tokens.mean() == pytest.approx(mean, rel=0.05)
    for percentile, published in percentiles.items():
        assert np.percentile(tokens, percentile) == pytest.approx(published, rel=tolerance), percentile


def test_what_is_beyond_a_limit_is_drawn_anew() -> None:
    drawn = lengths(prompt="sharegpt", output="sharegpt", max_prompt=300, max_total=700).draw(
        np.random.default_rng(0), 5000
    )
    assert drawn.shape == (5000, 2)
    assert drawn[:, 0].max() <= 300
    assert drawn.sum(axis=1).max() <= 700
    assert drawn[:, 0].max() > 290, "cut at the limit, not far below it"
    assert (drawn[:, 0] == 300).mean() < 0.01, "not piled up at it"


def test_limits_that_nothing_fits() -> None:
    with pytest.raises(ConfigError, match="max_total"):
        lengths(prompt=10, output=10, max_total=19).draw(np.random.default_rng(0), 10)


def test_fixed_and_even_lengths() -> None:
    drawn = lengths(prompt=[3, 5], output=7).draw(np.random.default_rng(0), 3000)
    assert [int((drawn[:, 0] == tokens).sum()) // 100 for tokens in (3, 4, 5)] == pytest.approx(
        [10, 10, 10], abs=1
    )
    assert set(drawn[:, 1].tolist()) == {7}


def test_sides_may_be_of_different_stand_ins() -> None:
    drawn = lengths(prompt="zipf-s", output="zipf-l").draw(np.random.default_rng(0), COUNT)
    assert drawn.mean(axis=0) == pytest.approx([128, 512], rel=0.05)


@pytest.mark.parametrize("side", [0, -1, True, 1.5, [5], [5, 4], [0, 3], "sharegp", None, 1 << 30])
def test_a_side_that_cannot_be(side: object) -> None:
    with pytest.raises(ValidationError, match="is right"):
        lengths(prompt=side, output=1)


def spearman(a: I64, b: I64) -> float:
    ranks = np.array([np.argsort(np.argsort(side)) for side in (a, b)], dtype=np.float64)
    return float(np.ravel(np.corrcoef(ranks))[1])


def sides(seed: int, count: int) -> tuple[I64, I64]:
    rng = np.random.default_rng(seed)
    prompts, outputs = (np.ceil(rng.lognormal(6, 1, count)).astype(np.int64) for _ in range(2))
    return prompts, outputs


@given(st.integers(0, 1 << 20), st.floats(-1, 1))
def test_the_outputs_are_the_same_ones_and_as_alike_as_wanted(seed: int, rank: float) -> None:
    prompts, outputs = sides(seed, 4000)
    drawn = coupled(prompts, outputs, rank, np.random.default_rng(seed))
    assert sorted(drawn) == sorted(outputs)
    assert spearman(prompts, drawn) == pytest.approx(rank, abs=0.08)


def test_the_longest_prompt_has_the_longest_answer_at_one() -> None:
    prompts, outputs = sides(1, 50)
    drawn = coupled(prompts, outputs, 1.0, np.random.default_rng(1))
    assert (np.diff(drawn[np.argsort(prompts, kind="stable")]) >= 0).all()
