"""LLM Microserving's experiments at small scale: its set-up, and what must come out of any size of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvloom.lab.reproduce.microserving.load import Points, jct, sweep, tpot, ttft
from kvloom.lab.reproduce.microserving.migration import CONTEXTS, UNIQUE, Move, move
from kvloom.lab.reproduce.microserving.setup import (
    DATA_PARALLEL,
    LINK,
    MODEL,
    ONE_ONE,
    ONE_ONE_BALANCE,
    SHAREGPT,
    Pattern,
    balance,
    run_point,
    synthetic,
    units,
)
from kvloom.lab.sim.unit import LATENCY
from kvloom.lab.workload.lengths import Sides
from kvloom.lab.workload.request import RequestResult, WorkloadRequest
from kvloom.plan.cost.shapes import find_shape
from tests.lab.reproduce.played import quiet

LAYER_BYTES = find_shape(MODEL).kv_bytes // find_shape(MODEL).layers  # of a token


@pytest.mark.parametrize(
    ("lengths", "prompt", "output", "spread"),
    [(SHAREGPT, 200, 260, None), (synthetic(3000), 3000, 100, 5), (synthetic(5000), 5000, 100, 5)],
)
def test_lengths_are_the_papers(lengths: Sides, prompt: int, output: int, spread: float | None) -> None:
    rng = np.random.default_rng(7)
    prompts, outputs = lengths.prompt.draw(rng, 50_000), lengths.output.draw(rng, 50_000)
    assert math.isclose(prompts.mean(), prompt, rel_tol=0.03)
    assert math.isclose(outputs.mean(), output, rel_tol=0.03)
    if spread:
        assert math.isclose(prompts.std(), spread, rel_tol=0.03)
        assert math.isclose(outputs.std(), spread, rel_tol=0.03)


def test_the_pool_is_what_a_gpu_of_40_gb_has_beside_the_weights() -> None:
    (unit,) = units(1)
    assert 20e9 < unit.spec.kv_bytes < 24e9
    assert unit.spec.kv_bytes + find_shape(MODEL).weight_bytes < 40e9


def asked(pattern: Pattern, rate: float) -> list[WorkloadRequest]:
    outcomes: list[RequestResult] = []
    run_point(pattern, SHAREGPT, rate, 20, outcomes.append)
    return sorted((outcome.request for outcome in outcomes), key=lambda ask: ask.at)


def test_all_patterns_and_rates_are_asked_the_same() -> None:
    here, there = asked(DATA_PARALLEL, 2.0), asked(ONE_ONE, 4.0)
    assert [(a.prompt, a.output) for a in here] == [(a.prompt, a.output) for a in there]
    assert [a.at for a in here] == pytest.approx([2 * a.at for a in there])


@pytest.fixture(scope="module")
def moves() -> list[Move]:
    return [move(context, cached=True) for context in CONTEXTS]


def test_a_layer_is_moved_in_the_time_of_its_bytes(moves: list[Move]) -> None:
    layers = find_shape(MODEL).layers
    for context, found in zip(CONTEXTS, moves, strict=True):
        copies = 1 + layers  # the context's, and each layer's
        expected = (context + UNIQUE) * LAYER_BYTES / LINK + copies / layers * LATENCY
        assert found.transfer == pytest.approx(expected, rel=1e-6)


def test_the_last_layer_alone_is_not_hidden(moves: list[Move]) -> None:
    for found in moves:
        assert 0 < found.seconds - found.layer * find_shape(MODEL).layers < found.layer


def test_a_cached_context_spares_its_computing(moves: list[Move]) -> None:
    for context, found in zip(CONTEXTS, moves, strict=True):
        anew = move(context, cached=False)
        assert anew.seconds / found.seconds > 0.7 * (context + UNIQUE) / UNIQUE
        assert anew.seconds > found.seconds


@pytest.fixture(scope="module")
def points() -> Points:
    patterns = (DATA_PARALLEL, ONE_ONE, ONE_ONE_BALANCE, balance(0.3))
    return sweep(patterns, synthetic(3000), (2.0,), 40, quiet)


def test_disaggregation_trades_first_tokens_for_later_ones(points: Points) -> None:
    together, apart, even = (points[2.0, p.name] for p in (DATA_PARALLEL, ONE_ONE, ONE_ONE_BALANCE))
    assert tpot(apart) < tpot(even) < tpot(together)
    assert ttft(together) < ttft(even) < ttft(apart)
    assert jct(even) < jct(together)


def test_the_more_the_decoder_computes_the_earlier_the_first_token(points: Points) -> None:
    assert ttft(points[2.0, "balance 0.3"]) < ttft(points[2.0, ONE_ONE_BALANCE.name])
    assert tpot(points[2.0, "balance 0.3"]) > tpot(points[2.0, ONE_ONE_BALANCE.name])


def test_progress_ends_at_the_whole() -> None:
    told: list[float] = []
    sweep((DATA_PARALLEL, ONE_ONE), SHAREGPT, (1.0, 2.0), 3, lambda _, part: told.append(part))
    assert told == pytest.approx([i / 12 for i in range(1, 13)])
