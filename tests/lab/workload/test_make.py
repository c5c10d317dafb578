"""Requests out of a spec, and the tokens of their prompts: shared in the segments, and nowhere else."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvloom.lab.workload.request import LOWEST, Prompts, Segment, WorkloadRequest
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
    ("given_settings", "said"),
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
def test_what_cannot_be(given_settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        spec(**given_settings)


def test_the_steepest_power_law_of_the_most_models() -> None:
    made = asks(models=[f"m{i}" for i in range(4096)], alpha=20, seconds=20)
    assert {ask.model for ask in made} == {"m0"}
    assert len(made) / 20 == pytest.approx(20, rel=0.2)


segments = st.lists(st.builds(Segment, st.integers(-5, 1 << 53), st.integers(1, 20)), max_size=5)


def an_ask(shared: list[Segment], own: int) -> WorkloadRequest:
    return WorkloadRequest(
        at=0.0,
        model="m",
        prompt=sum(one.tokens for one in shared) + own or 1,
        output=1,
        shared=tuple(shared),
    )


@settings(max_examples=60, deadline=None)
@given(segments, st.integers(0, 30), st.integers(0, 1 << 40), st.integers(32, 1 << 31), st.integers(0, 99))
def test_as_many_tokens_as_asked_within_the_vocabulary(
    shared: list[Segment], own: int, number: int, vocab: int, seed: int
) -> None:
    ask = an_ask(shared, own)
    tokens = Prompts(vocab, seed)(number, ask)
    assert len(tokens) == ask.prompt
    assert all(LOWEST <= token < vocab for token in tokens)
    assert tokens == Prompts(vocab, seed)(number, ask)


@settings(max_examples=60, deadline=None)
@given(segments, st.integers(1, 20), st.integers(0, 20), st.integers(0, 20))
def test_equal_segments_are_equal_tokens_wherever_they_stand(
    before: list[Segment], tokens: int, one: int, other: int
) -> None:
    """Also where one of them is cut."""
    prompts = Prompts(1 << 20)
    first = prompts(1, an_ask([Segment(7, tokens + one)], 3))
    second = prompts(2, an_ask([*before, Segment(7, tokens + other)], 3))
    at = sum(segment.tokens for segment in before)
    assert second[at : at + tokens] == first[:tokens]


def test_different_is_different() -> None:
    own = [Prompts(1 << 20)(number, an_ask([], 8)) for number in range(50)]
    shared = [Prompts(1 << 20)(0, an_ask([Segment(number, 8)], 0)) for number in range(50)]
    seeds = [Prompts(1 << 20, seed)(0, an_ask([], 8)) for seed in range(1, 50)]
    assert len({tuple(tokens) for tokens in (*own, *shared, *seeds)}) == 149
    assert len({tokens[0] for tokens in own}) == 50, "not even a first token is shared"


def test_the_tokens_stay_as_they_are() -> None:
    """A recorded workload means the same next year."""
    assert Prompts(1000, 3)(5, an_ask([Segment(9, 2)], 2)) == [331, 460, 735, 322]


def test_text_has_a_word_for_each_token() -> None:
    prompts = Prompts(256)
    asks = [an_ask([Segment(1, 4)], own) for own in (2, 6)]
    one, other = (prompts.text(number, ask).split() for number, ask in enumerate(asks))
    assert (len(one), len(other)) == (6, 10)
    assert one[:4] == other[:4]
