"""Law 1 after every operation, and the right content in every page, whatever the order of operations."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.kv.play import OFTEN, Play


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(moves=st.lists(st.tuples(st.sampled_from(sorted(OFTEN)), st.integers(0, 999)), max_size=40))
def test_short_plays(moves: list[tuple[str, int]]) -> None:
    """What a longer play finds, hypothesis makes short here."""
    play = Play()
    for move, seed in moves:
        getattr(play, move)(Random(seed))
        play.check()
    play.finish()


@pytest.mark.parametrize("seed", range(24))
def test_long_plays(seed: int) -> None:
    play, random = Play(), Random(seed)
    for move in random.choices(list(OFTEN), list(OFTEN.values()), k=500):
        getattr(play, move)(random)
        play.check()
    play.finish()
