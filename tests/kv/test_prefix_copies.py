"""The policy of copies, case by case, and its laws over drawn views."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.kv.prefix_copies import (
    COLD,
    LEAST_USES,
    MOST_STEPS,
    CopyPrefix,
    CopyView,
    EvictPrefix,
    PrefixUse,
    copies_wanted,
    plan_copies,
)

LOADS = {"a": 300, "b": 100, "c": 0, "d": 200}


def use(uses: float, *holders: str, prefix: bytes = b"p", tokens: int = 100, copied: str = "") -> PrefixUse:
    return PrefixUse(prefix, tokens, uses, frozenset(holders), frozenset(copied))


def view(*prefixes: PrefixUse, requests: float = 100.0, most: int = 4) -> CopyView:
    return CopyView(prefixes, requests, LOADS, most)


@pytest.mark.parametrize(
    ("seen", "steps"),
    [
        (view(use(20.0, "a")), []),  # a unit can answer these alone
        (view(use(26.0, "a")), [CopyPrefix(b"p", "a", "c")]),
        (view(use(51.0, "a", "b")), [CopyPrefix(b"p", "b", "c")]),
        (view(use(100.0, "a"), most=2), [CopyPrefix(b"p", "a", "c")]),
        (view(use(100.0)), []),  # nobody could send it
        (view(use(100.0, "gone")), []),
        (view(use(LEAST_USES - 1, "a"), requests=LEAST_USES - 1), []),
        (view(use(0.0, *"abd", copied="abd")), [EvictPrefix(b"p", "a"), EvictPrefix(b"p", "d")]),
        (view(use(0.0, *"abd", copied="bc")), [EvictPrefix(b"p", "b")]),
        (view(use(0.0, *"abd")), []),  # they have computed it themselves
        (view(use(0.0, "a", copied="a")), []),  # the last one stays
        (view(use(COLD, *"abd", copied="abd")), []),
        (view(use(0.0, "a", "gone")), []),
        (view(), []),
    ],
)
def test_a_step(seen: CopyView, steps: list[CopyPrefix | EvictPrefix]) -> None:
    assert plan_copies(seen) == steps


def test_what_saves_most_goes_first() -> None:
    long, short = use(30.0, "a", prefix=b"long", tokens=900), use(60.0, "a", prefix=b"short", tokens=100)
    first, *others = plan_copies(view(short, long))
    assert first == CopyPrefix(b"long", "a", "c")
    assert {step.prefix for step in others} == {b"short"}


uses = st.builds(
    PrefixUse,
    st.binary(min_size=1, max_size=1),
    st.integers(1, 1000),
    st.floats(0, 100),
    st.frozensets(st.sampled_from("abcdxy")),
    st.frozensets(st.sampled_from("abcdxy")),
)


@settings(deadline=None, derandomize=True)
@given(
    st.lists(uses, max_size=6, unique_by=lambda one: one.prefix),
    st.floats(0, 200),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9)),
    st.integers(1, 5),
)
def test_steps_lead_to_what_is_wanted(
    prefixes: list[PrefixUse], requests: float, loads: dict[str, int], most: int
) -> None:
    """A copy goes from a holder to another unit, an eviction leaves one holder, and it comes to an end."""
    for _ in range(100):
        seen = CopyView(tuple(prefixes), requests, loads, most)
        steps = plan_copies(seen)
        assert len(steps) <= MOST_STEPS
        if not steps:
            return
        for step in steps:
            at = next(number for number, one in enumerate(prefixes) if one.prefix == step.prefix)
            one = prefixes[at]
            if isinstance(step, CopyPrefix):
                assert step.source in one.holders
                assert step.target in loads.keys() - one.holders
                holders = one.holders | {step.target}
                assert len(holders & loads.keys()) <= copies_wanted(one, seen) <= most
            else:
                assert one.uses < COLD
                assert step.unit in loads.keys() & one.copied
                holders = one.holders - {step.unit}
                assert holders & loads.keys()
            prefixes[at] = PrefixUse(one.prefix, one.tokens, one.uses, holders, one.copied)
    raise AssertionError("it goes on for ever")
