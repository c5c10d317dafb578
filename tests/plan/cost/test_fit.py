"""Fits: what they find again, and how far the roofline is from what was measured elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.fit_cost_model import (
    FREE,
    Row,
    fit,
    fit_log,
    held_out,
    predict,
    published_spreads,
    read_rows,
    spreads,
)

from kvloom.plan.cost.devices import FITTED
from kvloom.plan.cost.fit import Spread, fit_nonnegative
from kvloom.plan.cost.work import Work

PROFILE = "muxserve_a100_profile.csv"


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    folder = os.environ.get("KVLOOM_DATA")
    if folder is None or not (Path(folder) / PROFILE).is_file():
        pytest.skip(f"KVLOOM_DATA names no folder with {PROFILE}")
    return read_rows(Path(folder) / PROFILE)


def synthetic() -> list[Row]:
    rows = []
    for gpus, model in ((1, "llama-7b"), (1, "llama-13b"), (4, "llama-65b")):
        for share in (0.3, 0.6, 1.0):
            for batch in (1, 4, 16, 64, 256):
                for make in (Work.prefill, Work.decode):
                    rows.append(Row(gpus, make(model, share, [64] * batch), 0.0))
    return rows


def test_a_fit_finds_the_constants_again() -> None:
    true = msgspec.structs.replace(FITTED, compute=0.5, host=0.2e-3, sequence=100.0, link=0.3)
    rows = synthetic()
    measured = [Row(row.gpus, row.work, s) for row, s in zip(rows, predict(rows, true), strict=True)]
    found = fit(measured, FITTED, rounds=60)
    for name in FREE:
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.02), name


def test_outliers_do_not_decide() -> None:
    x = np.arange(1.0, 41.0)
    seconds = 3.0 * x
    seconds[::10] *= 5.0
    found = fit_log(lambda c: c[0] * x, seconds, np.array([1.0]))
    assert found[0] == pytest.approx(3.0, rel=0.02)


@given(st.lists(st.floats(0.0, 10.0), min_size=3, max_size=3), st.integers(0, 2**32 - 1))
def test_positive_coefficients_are_found_again(true: list[float], seed: int) -> None:
    features = np.random.default_rng(seed).uniform(0.1, 1.0, (20, 3)) * [1.0, 1e3, 1e-3]
    coefficients = np.array(true) / [1.0, 1e3, 1e-3]
    seconds = features @ coefficients + 1e-3
    features = np.column_stack([features, np.ones(20)])
    found = fit_nonnegative(features, seconds)
    assert (found >= 0.0).all()
    assert features @ found == pytest.approx(seconds, rel=1e-6)


def test_a_coefficient_that_would_be_negative_is_nothing() -> None:
    x = np.arange(1.0, 9.0)
    found = fit_nonnegative(np.column_stack([np.ones(8), x]), 20.0 - x)
    assert found[1] == 0.0
    assert 12.0 < found[0] < 19.0


def test_a_spread_says_how_far() -> None:
    spread = Spread.of([1.0, 2.2, 2.7], [1.0, 2.0, 3.0])
    assert spread.rows == 3
    assert [spread.median, spread.p90] == pytest.approx([0.1, 0.1])
    assert spread.bias == pytest.approx(0.0)


def test_latencies_published_elsewhere() -> None:
    """docs/cost-model.md holds the numbers. Prefills of other serving systems differ by their kernels."""
    found = published_spreads()
    assert {key.split(",")[0] for key in found} == {"MuxServe", "DistServe", "vLLM by DistServe", "Splitwise"}
    for key, spread in found.items():
        assert spread.median < (0.3 if "prefill" in key else 0.15), key


def test_unseen_rows_of_the_published_profile(rows: list[Row]) -> None:
    """A tenth of the rows is fitted, so that it is quick."""
    assert len(rows) == 7600
    for name, unseen in held_out(rows).items():
        kept = [row for row in rows if unseen(row)]
        seen = [row for row in rows if not unseen(row)][::10]
        assert spreads(kept, fit(seen, rounds=20))["all"].median < 0.1, name


def test_the_constants_are_those_of_the_profile(rows: list[Row]) -> None:
    fitted = spreads(rows, FITTED)
    assert fitted["all"].median < 0.05
    assert all(spread.median < 0.1 for key, spread in fitted.items() if key != "prefill, more")
