"""Requests out of a spec."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from pydantic import ValidationError

from kvloom.lab.workload.request import Prompts, WorkloadRequest
from tests.lab.workload.specs import asks, spec

TRACE = {"replay": {"file": "x.csv"}, "rate": ..., "lengths": ...}
TALKS = {"conversation": {"turns": 4, "pause": 5, "max_context": 300}}


def test_they_come_in_order_until_the_end_at_their_rates() -> None:
    made = asks(rate=None, models={"a": {"rate": 30}, "b": {"rate": 10}})
    assert all(one.at <= other.at < 60 for one, other in pairwise(made))
    counts = Counter(ask.model for ask in made)
    assert counts["a"] / 60 == pytest.approx(30, rel=0.1)
    assert counts["b"] / 60 == pytest.approx(10, rel=0.1)


def test_the_most_popular_model_has_the_top_rate() -> None:
    counts = Counter(ask.model for ask in asks(rate=None, top_rate=20, alpha=1.0, seconds=300))
    assert (counts["a"] / 300, counts["b"] / 300) == pytest.approx((20, 10), rel=0.1)


def test_a_number_of_requests_ends_it_too() -> None:
    assert len(asks(seconds=..., requests=77)) == 77
    assert len(asks(seconds=60, requests=10)) == 10
    assert len(asks(seconds=0.5, requests=1000)) < 100


def test_the_same_spec_makes_the_same_requests() -> None:
    assert asks(**TALKS) == asks(**TALKS)
    assert asks(**TALKS) != asks(**TALKS, seed=1)


def test_a_models_requests_do_not_depend_on_the_others() -> None:
    def of_a(**settings: object) -> list[WorkloadRequest]:
        return [ask for ask in asks(rate=None, **settings) if ask.model == "a"]

    both = {"a": {"rate": 9}, "b": {"rate": 5}}
    alone = {"c": {"rate": 2, "lengths": "sharegpt", "priorities": {3: 1.0}}, "a": {"rate": 9}}
    assert of_a(models=both) == of_a(models=alone)


def test_lengths_do_not_change_arrivals() -> None:
    assert [ask.at for ask in asks()] == [
        ask.at for ask in asks(lengths="zipf-m", priorities={1: 0.5, 2: 0.5})
    ]


def test_priorities_by_their_shares() -> None:
    counts = Counter(ask.priority for ask in asks(priorities={-1: 0.1, 0: 0.9}, seconds=300))
    assert counts[-1] / counts.total() == pytest.approx(0.1, abs=0.02)
    assert {ask.priority for ask in asks(priorities={"-7": 1.0})} == {-7}


def test_system_prompts_come_first_and_are_few() -> None:
    made = asks(system={"tokens": 16, "kinds": 3, "share": 0.75})
    kinds: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    prompts = Prompts(500)
    for number, ask in enumerate(made):
        if ask.shared:
            [opening] = ask.shared
            assert opening.tokens == 16
            assert 5 <= ask.prompt - 16 <= 40
            kinds[ask.model].add(tuple(prompts(number, ask)[:16]))
        else:
            assert ask.prompt <= 40
    assert {model: len(found) for model, found in kinds.items()} == {"a": 3, "b": 3}
    assert not kinds["a"] & kinds["b"]
    assert sum(bool(ask.shared) for ask in made) / len(made) == pytest.approx(0.75, abs=0.05)


def test_a_turn_begins_with_all_that_was_said_before() -> None:
    made = asks(**TALKS, system={"tokens": 8}, seconds=200)
    talks: dict[int, list[WorkloadRequest]] = defaultdict(list)
    for ask in made:
        talks[ask.shared[1].id].append(ask)  # the first is the system prompt
        assert ask.prompt == sum(segment.tokens for segment in ask.shared)
    lengths = Counter(len(turns) for turns in talks.values())
    assert max(lengths) > 4
    prompts = Prompts(10_000)
    for turns in talks.values():
        for one, other in pairwise(turns):
            assert other.at > one.at
            assert other.prompt > one.prompt + one.output
            assert prompts(0, other)[: one.prompt] == prompts(0, one)
            assert other.prompt + other.output <= 300
    assert len(made) / 200 == pytest.approx(20, rel=0.25), "turns, not conversations, come at the rate"


def test_conversations_of_one_turn_are_single_requests() -> None:
    made = asks(conversation={"turns": 1, "pause": 1})
    assert len(made) / 60 == pytest.approx(20, rel=0.15)
    assert len({ask.shared[0].id for ask in made}) == len(made)


def test_drift_makes_another_model_the_busiest() -> None:
    made = asks(drift={"swing": 2.0, "period": 60}, seed=3, rate=50)
    halves = [Counter(ask.model for ask in made if ask.at // 30 == half) for half in (0, 1)]
    assert halves[0].most_common(1)[0][0] != halves[1].most_common(1)[0][0]
    assert len(made) / 60 == pytest.approx(50, rel=0.1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seconds": ...}, "seconds, requests or both"),
        ({"rate": ...}, "one of rate, top_rate"),
        ({"top_rate": 3}, "one of rate, top_rate"),
        ({"models": {"a": {"rate": 3}, "b": {}}, "rate": ...}, r"models\.b\.rate: is missing"),
        ({"models": {"a": {"rate": 3}, "b": {"rate": 1}}, "rate": ..., "alpha": 1}, "alpha"),
        ({"models": ["a", "a"]}, "each once"),
        ({"models": []}, "at least 1"),
        ({"rate": -1}, "greater than or equal to 0.000000001"),
        ({"rate": 1e-320}, "greater than or equal to 0.000000001"),
        ({"name": "a\nb"}, "printable"),
        ({"models": ["a", "b\n"]}, "printable"),
        ({"rate": float("nan")}, "finite"),
        ({"rate": float("inf")}, "finite"),
        ({"seconds": 0}, "greater than 0"),
        ({"requests": 0}, "greater than or equal to 1"),
        ({"requests": 1.5}, "integer"),
        ({"arrivals": "posson"}, "poisson, constant"),
        ({"arrivals": {"cv": 0}}, "poisson, constant"),
        ({"priorities": {0: 0.0}}, "is right"),
        ({"priorities": {"high": 1.0}}, "high"),
        ({"system": {"tokens": 0}}, "greater than or equal to 1"),
        ({"conversation": {"turns": 0.5, "pause": 1}}, "greater than or equal to 1"),
        ({"vocab": 3}, "greater than or equal to 32"),
        ({"speed": 3}, "Extra inputs"),
        ({"replay": {"file": "x.csv"}}, "rate: a replayed trace"),
        ({**TRACE, "models": {"a": {"rate": 3}, "b": {}}}, r"models\.b\.rate: is missing"),
        ({**TRACE, "models": {"a": {"system": {"tokens": 3}}}}, r"models\.a\.system: a replayed trace"),
    ],
)
def test_what_cannot_be(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        spec(**settings)


def test_the_steepest_power_law_of_the_most_models() -> None:
    made = asks(models=[f"m{i}" for i in range(4096)], alpha=20, seconds=20)
    assert {ask.model for ask in made} == {"m0"}
    assert len(made) / 20 == pytest.approx(20, rel=0.2)
