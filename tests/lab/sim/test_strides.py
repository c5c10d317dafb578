"""Stepping over stretches in which nothing is decided changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.types.load import UnitLoad
from kvloom.types.spec import Policy
from tests.lab.sim.fleets import asks, outcomes, unit


def check_like(units: list[SimulatedUnit], *, seed: int, rate: float, count: int = 16) -> None:
    played = asks(count, seed=seed, rate=rate, models=list(units[0].shapes))
    stepped, each_load = outcomes([replace(unit, stride=1) for unit in units], played)
    strode, load = outcomes(units, played)
    for ask, outcome in strode.items():
        assert outcome.tokens == ask.output == stepped[ask].tokens
        assert not outcome.error
        assert outcome.first == pytest.approx(stepped[ask].first, rel=1e-9)
        assert outcome.end == pytest.approx(stepped[ask].end, rel=1e-9)
    assert {name: paceless(one) for name, one in load.items()} == {
        name: paceless(one) for name, one in each_load.items()
    }


def paceless(load: UnitLoad) -> UnitLoad:
    """Of many steps in one only the mean is known."""
    models = {name: structs.replace(model, step_seconds=0.0) for name, model in load.models.items()}
    return structs.replace(load, models=models)


@pytest.mark.parametrize("policy", ["adbs", "fcfs", "round-robin", "partitioned"])
@settings(deadline=None, max_examples=4, derandomize=True)
@given(seed=st.integers(0, 2**32), rate=st.sampled_from([1.0, 5.0, 20.0, 200.0]))
def test_one_model_alone(policy: Policy, seed: int, rate: float) -> None:
    check_like([unit(models=["small"], policy=policy)], seed=seed, rate=rate)


@pytest.mark.parametrize("policy", ["adbs", "fcfs", "round-robin", "partitioned"])
@settings(deadline=None, max_examples=4, derandomize=True)
@given(seed=st.integers(0, 2**32), rate=st.sampled_from([1.0, 5.0, 20.0, 200.0]))
def test_two_models_share_a_pool(policy: Policy, seed: int, rate: float) -> None:
    check_like([unit(policy=policy)], seed=seed, rate=rate)


@settings(deadline=None, max_examples=4, derandomize=True)
@given(seed=st.integers(0, 2**32), blocks=st.integers(66, 160))
def test_a_short_pool(seed: int, blocks: int) -> None:
    check_like([unit(models=["small"], blocks=blocks)], seed=seed, rate=50)
