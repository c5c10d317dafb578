"""Whether K and V are copied or computed again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvloom.cluster.policies.moving import LONGEST_PAUSE, MoveCounts, MoveTerms
from kvloom.types.load import LinkLoad, UnitLoad
from tests.cluster.loads import model, unit

known = st.floats(1e-3, 1e12)
terms = st.builds(MoveTerms, known, known, known)
lengths = st.integers(1, 1 << 20)


@given(terms, lengths)
def test_what_is_done_takes_no_longer_than_what_is_not(some: MoveTerms, tokens: int) -> None:
    copying, computing = tokens * some.token_bytes / some.rate, tokens / some.speed
    chosen = {"copying": copying, "computing": computing}[some.judge(tokens)]
    assert chosen == min(copying, computing)


@given(terms, lengths, lengths)
def test_what_is_sooner_for_one_length_is_so_for_all(some: MoveTerms, one: int, other: int) -> None:
    """Both take time by the token, to a part in 10^9."""
    ratio = some.token_bytes / some.rate * some.speed
    if abs(ratio - 1) > 1e-9:
        assert some.judge(one) == some.judge(other)


@given(terms, lengths, st.floats(1.0, 1e6))
def test_a_faster_link_never_makes_it_compute(some: MoveTerms, tokens: int, factor: float) -> None:
    faster = MoveTerms(some.token_bytes, some.rate * factor, some.speed)
    if some.judge(tokens) == "copying":
        assert faster.judge(tokens) == "copying"
    if some.judge(tokens, LONGEST_PAUSE) == "copying":
        assert faster.judge(tokens, LONGEST_PAUSE) == "copying"


@given(terms, lengths, st.floats(0, 100))
def test_a_stream_stands_still_for_no_longer_than_it_may(some: MoveTerms, tokens: int, most: float) -> None:
    copying, computing = tokens * some.token_bytes / some.rate, tokens / some.speed
    match some.judge(tokens, most):
        case "copying":
            assert copying <= 2 * computing
        case "computing":
            assert computing <= most
            assert copying > 2 * computing
        case "neither":
            assert computing > most
            assert copying > 2 * computing
        case reason:
            raise AssertionError(reason)


@given(terms, lengths, st.sampled_from([None, 1.0]), st.integers(0, 2))
def test_what_is_not_known_decides_nothing(
    some: MoveTerms, tokens: int, most: float | None, missing: int
) -> None:
    told = [some.token_bytes, some.rate, some.speed]
    told[missing] = 0.0
    assert MoveTerms(*told).judge(tokens, most) == "unmeasured"


def _units() -> tuple[UnitLoad, UnitLoad]:
    """A source whose token takes 2 blocks of 4,096 bytes, and a destination."""
    source = replace(unit(model(size=32)), links={"b": LinkLoad("tcp", 1e9)})
    return source, unit(model(size=32, prefill_speed=500.0))


def test_the_terms_are_the_sources_link_and_the_destinations_speed() -> None:
    source, there = _units()
    assert MoveTerms.of("m", source, "b", there) == MoveTerms(8192.0, 1e9, 500.0)


def test_units_that_have_not_told_make_no_terms() -> None:
    source, there = _units()
    nothing = MoveTerms(0.0, 0.0, 0.0)
    assert MoveTerms.of("m", None, "b", there) == nothing
    assert MoveTerms.of("m", source, "b", None) == nothing
    assert MoveTerms.of("m", source, "c", there) == nothing
    assert MoveTerms.of("another", source, "b", there) == nothing


def test_decisions_are_counted_by_what_and_why() -> None:
    counts = MoveCounts()
    slow = MoveTerms(8192.0, 1e3, 500.0)
    assert counts.judge("context", slow, 100) == "computing"
    assert counts.judge("request", slow, 100, 1.0) == "computing"
    assert counts.judge("request", slow, 1000, 1.0) == "neither"
    assert counts.judge("prefix", MoveTerms(0.0, 0.0, 0.0), 1) == "unmeasured"
    assert counts.judge("prefix", MoveTerms(8192.0, 1e9, 500.0), 1) == "copying"
    assert counts.counts == {
        ("context", "computing"): 1,
        ("request", "computing"): 1,
        ("request", "neither"): 1,
        ("prefix", "unmeasured"): 1,
        ("prefix", "copying"): 1,
    }
