"""Prompts and answers that are long together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.lab.workload.lengths import coupled
from kvloom.types.geometry import I64


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
