"""When requests come, and to whom."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from kvloom.lab.workload.arrivals import Gaps, Steps, arrivals, constant, gamma, poisson, power_law
from kvloom.lab.workload.spec import STEPS, Drift


def first(count: int, gaps: Gaps, rate: Steps, seed: int = 0) -> list[float]:
    return list(islice(arrivals(gaps, rate, np.random.default_rng(seed)), count))


@pytest.mark.parametrize(
    ("gaps", "cv"), [(poisson, 1.0), (gamma(4.0), 4.0), (gamma(0.5), 0.5), (constant, 0.0)]
)
def test_rate_and_spread(gaps: Gaps, cv: float) -> None:
    times = np.array(first(100_000, gaps, Steps(np.array([5.0]))))
    between = np.diff(times)
    assert (between >= 0).all()
    assert 1 / between.mean() == pytest.approx(5.0, rel=0.05)
    assert between.std() / between.mean() == pytest.approx(cv, rel=0.05, abs=1e-6)


def test_a_rate_that_changes_with_the_time() -> None:
    """30 a second in the first half of each ten seconds, none in the third quarter, 10 in the last."""
    times = np.array(first(40_000, poisson, Steps(np.array([30.0, 30.0, 0.0, 10.0]), 10.0)))
    quarters = np.bincount((times % 10 // 2.5).astype(int), minlength=4) / len(times)
    assert quarters == pytest.approx([3 / 7, 3 / 7, 0, 1 / 7], abs=0.01)
    assert times[-1] == pytest.approx(40_000 / 17.5, rel=0.02)


@pytest.mark.parametrize(
    ("alpha", "total"), [(0.7, 107.0), (0.9, 80.6), (1.3, 51.3), (1.7, 37.5), (2.1, 30.5)]
)
def test_the_rates_of_muxserve(alpha: float, total: float) -> None:
    """19 models, of which the most popular has 20 requests a second."""
    shares = power_law(19, alpha)
    assert shares.sum() == pytest.approx(1)
    assert 20 / shares[0] == pytest.approx(total, abs=0.06)


def test_drift_moves_popularity_but_not_the_whole() -> None:
    rates = 10 * power_law(4, 1.0)
    drifted = Drift(swing=0.8).rates(rates, np.array([0.0, 0.25, 0.5, 0.75]))
    assert drifted.shape == (4, STEPS)
    assert drifted.sum(axis=0) == pytest.approx(np.full(STEPS, 10.0))
    assert drifted.argmax(axis=0).max() > 0, "another one is the most popular at some time"
    assert Drift(swing=0.0).rates(rates, np.zeros(4)) == pytest.approx(np.repeat(rates[:, None], STEPS, 1))
