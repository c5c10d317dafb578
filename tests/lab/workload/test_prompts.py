"""A prompt's tokens: shared where the segments are, and nowhere else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.lab.workload.request import LOWEST, Prompts, Segment, WorkloadRequest

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
