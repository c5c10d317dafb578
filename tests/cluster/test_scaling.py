"""When there is one replica more or less, and which."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvloom.cluster.policies.autoscale import (
    AddReplicas,
    Outside,
    RemoveReplica,
    Step,
    fewest_running,
    mean_freeness,
    rescale,
)
from kvloom.engine.freeness import freeness, wanted
from kvloom.types.load import UnitLoad
from kvloom.types.service import Scale
from tests.cluster.loads import model, unit

SCALE = Scale(least=2, most=4, low=100, high=400, seconds=10)


def fleet(*pages: int, running: int = 4) -> dict[str, UnitLoad]:
    """Units a, b, c … of 1,000 pages, of which so many are held."""
    return {name: unit(model(running, 16 * held)) for name, held in zip("abcdef", pages, strict=False)}


def played(*loads: dict[str, UnitLoad], every: float = 5.0, starting: int = 0) -> list[Step | None]:
    """What is done at each report."""
    outside: Outside | None = None
    steps = []
    for number, some in enumerate(loads):
        outside, step = rescale(some, starting, outside, number * every, SCALE)
        steps.append(step)
    return steps


FULL, FINE, FREE = fleet(990, 990, 990), fleet(950, 950, 950), fleet(100, 100, 100)


def test_too_little_for_long_enough_starts_one() -> None:
    assert played(FULL, FULL, FULL, FULL) == [None, None, AddReplicas(), None]
    assert played(FULL, FINE, FULL, FULL) == [None] * 4
    assert played(FULL, FREE, FULL, FULL) == [None] * 4


def test_too_much_for_long_enough_drains_one() -> None:
    assert played(FREE, FREE, FREE, FREE) == [None, None, RemoveReplica("c"), None]
    assert played(FREE, FINE, FREE, FREE) == [None] * 4


def test_never_beyond_its_bounds() -> None:
    four = fleet(990, 990, 990, 990)
    assert played(four, four, four, four) == [None] * 4
    assert played(FULL, FULL, FULL, starting=1) == [None] * 3
    two = fleet(100, 100)
    assert played(two, two, two, two) == [None] * 4
    draining = FREE | {"b": replace(FREE["b"], draining=True)}
    assert played(draining, draining, draining) == [None] * 3
    assert played(two, two, two, starting=1) == [None] * 3  # those that start up cannot drain


def test_bounds_that_are_crossed_are_put_right_at_once() -> None:
    assert played(fleet(950)) == [AddReplicas()]
    assert played({}) == [AddReplicas()]
    assert played(fleet(950), starting=1) == [None]
    assert played(fleet(*[950] * 5)) == [RemoveReplica("e")]


def test_who_runs_fewest_drains() -> None:
    loads = {name: unit(model(running), model(1)) for name, running in zip("abcd", (5, 2, 9, 2), strict=True)}
    assert fewest_running(loads) == "d"


def test_the_mean_of_equal_batches_is_the_plain_one() -> None:
    loads = fleet(900, 500, 100)
    assert mean_freeness(loads) == pytest.approx(sum(map(freeness, loads.values())) / 3)


def test_an_idle_unit_is_not_infinitely_free() -> None:
    loads = fleet(990, 990, 990) | {"d": unit(model())}
    assert mean_freeness(loads) == 1030 / 12 * 16
    assert mean_freeness({"d": unit(model())}) == mean_freeness({}) == math.inf
    leaving = replace(unit(model(4, 160)), draining=True)
    assert mean_freeness(loads | {"e": leaving}) == mean_freeness(loads)


def test_large_blocks_weigh_more() -> None:
    small, large = unit(model(4, 16 * 900)), replace(unit(model(4, 16 * 500)), block_bytes=3 * 4096)
    assert mean_freeness({"a": small, "b": large}) == (100 + 3 * 500) / (4 + 3 * 4) * 16


def test_who_counts_all_that_waits_has_another_unit_sooner() -> None:
    """INFaaS++ does: a queue of 400 pages, of which the first that waits needs 10."""
    queue = unit(model(4, 16 * 500, waiting=40, head_blocks=10, waiting_blocks=400))
    loads = {"a": queue, "b": queue}
    assert mean_freeness(loads) == 2 * 490 / 8 * 16
    assert mean_freeness(loads, wanted) == 2 * 100 / 8 * 16
    low = Scale(least=1, most=4, low=500, high=5000, seconds=10)
    assert rescale(loads, 0, None, 0.0, low) == (None, None)
    assert rescale(loads, 0, Outside("low", 0.0), 10.0, low, usage=wanted) == (None, AddReplicas())


def test_a_long_queue_starts_as_many_as_it_needs() -> None:
    """Two units of 1,000 pages, full, with 16 sequences, and 1,500 or 2,500 pages wanted by what waits."""
    scale, low = Scale(least=1, most=9, low=100, high=400, seconds=10), Outside("low", 0.0)

    def started(pages: int, starting: int = 0, most: int = 9) -> Step | None:
        loads = fleet(1000) | {"b": unit(model(12, 16_000, waiting=9, head_blocks=99, waiting_blocks=pages))}
        return rescale(loads, starting, low, 10.0, replace(scale, most=most))[1]

    assert started(800) == AddReplicas(1)  # and 100 for a hundred steps of 16 sequences
    assert started(901) == started(1500) == AddReplicas(2)
    assert started(2500) == AddReplicas(3)
    assert started(2500, starting=1) == AddReplicas(2)
    assert started(2500, starting=6) == AddReplicas(1)
    assert started(2500, most=4) == AddReplicas(2)
    assert started(2500, starting=2, most=4) is None


def test_an_idle_fleet_that_nobody_has_asked_stays() -> None:
    loads = {name: unit(model()) for name in "abc"}
    assert played(loads, loads, loads, loads) == [None] * 4
    asked = loads | {"b": unit(model(prompt_tokens_total=1))}
    assert played(asked, asked, asked, asked) == [None, None, RemoveReplica("c"), None]


def test_none_goes_without_which_there_would_be_too_little() -> None:
    """A small batch makes the mean high, though one pool does not hold what there is in two."""
    full, empty = unit(model(1, 16 * 900)), unit(model(1, 16 * 50))
    three = {"a": full, "b": full, "c": empty}
    assert mean_freeness(three) > SCALE.high
    assert played(three, three, three) == [None, None, RemoveReplica("c")]
    crowded = {"a": full, "b": unit(model(1, 16 * 900)), "c": unit(model(1, 16 * 190))}
    assert mean_freeness(crowded) > SCALE.high
    assert played(crowded, crowded, crowded) == [None] * 3


@st.composite
def reported(draw: st.DrawFn) -> tuple[dict[str, UnitLoad], int]:
    loads = fleet(*draw(st.lists(st.sampled_from([100, 950, 990]), max_size=6)))
    drain = draw(st.sets(st.sampled_from("abcdef"), max_size=2))
    return {name: replace(load, draining=name in drain) for name, load in loads.items()}, draw(
        st.integers(0, 3)
    )


TO_ZERO = Scale(least=0, most=2, low=100, high=400, seconds=10, idle=60)


def test_the_last_goes_when_nobody_has_asked_for_long_enough() -> None:
    one = {"a": unit(model())}
    assert rescale(one, 0, None, 0.0, TO_ZERO, idle=59.9)[1] is None
    assert rescale(one, 0, None, 0.0, TO_ZERO, idle=60.0) == (None, RemoveReplica("a"))
    assert rescale(one, 0, None, 0.0, TO_ZERO, idle=60.0, waits=True)[1] is None
    assert rescale(one, 0, None, 0.0, SCALE, idle=1e9)[1] == AddReplicas()  # two at least
    assert rescale(one, 0, Outside("high", 0.0), 50.0, TO_ZERO)[1] is None  # free, and not idle
    leaving = {"a": replace(one["a"], draining=True)}
    assert rescale(leaving, 0, None, 0.0, TO_ZERO, idle=60.0) == (None, None)


def test_none_and_somebody_waits() -> None:
    assert rescale({}, 0, None, 0.0, TO_ZERO) == (None, None)
    assert rescale({}, 0, None, 0.0, TO_ZERO, waits=True) == (None, AddReplicas())
    assert rescale({}, 1, None, 0.0, TO_ZERO, waits=True) == (None, None)
    leaving = {"a": replace(unit(model()), draining=True)}
    assert rescale(leaving, 0, None, 0.0, TO_ZERO, waits=True) == (None, AddReplicas())


@given(
    st.integers(0, 3),
    st.integers(0, 3),
    st.lists(st.tuples(reported(), st.booleans(), st.sampled_from([0.0, 30.0, 60.0, 90.0])), max_size=8),
)
def test_whatever_waits_or_rests_the_bounds_hold(
    least: int, more: int, reports: list[tuple[tuple[dict[str, UnitLoad], int], bool, float]]
) -> None:
    scale = Scale(least=least, most=max(1, least + more), low=100, high=400, seconds=10, idle=60)
    outside: Outside | None = None
    for number, ((loads, starting), waits, idle) in enumerate(reports):
        outside, step = rescale(loads, starting, outside, number * 6.0, scale, waits=waits, idle=idle)
        serving = sum(not load.draining for load in loads.values())
        if isinstance(step, AddReplicas):
            assert serving + starting < scale.most
        if isinstance(step, RemoveReplica):
            assert not loads[step.unit].draining
            assert serving > scale.least
            assert serving > 1 or (idle >= scale.idle and not waits)
        if waits and not serving + starting:
            assert isinstance(step, AddReplicas)
        if not waits and not least and idle >= scale.idle and serving:
            assert isinstance(step, RemoveReplica)


@given(st.lists(reported(), max_size=8))
def test_whatever_is_reported_the_bounds_hold(reports: list[tuple[dict[str, UnitLoad], int]]) -> None:
    outside: Outside | None = None
    for number, (loads, starting) in enumerate(reports):
        outside, step = rescale(loads, starting, outside, number * 6.0, SCALE)
        serving = sum(not load.draining for load in loads.values())
        if isinstance(step, AddReplicas):
            assert serving + starting < SCALE.most
        if isinstance(step, RemoveReplica):
            assert not loads[step.unit].draining
            assert serving > SCALE.least


@pytest.mark.parametrize(
    ("least", "most", "low", "high"),
    [(-1, 1, 1, 2), (0, 0, 1, 2), (3, 2, 1, 2), (1, 2, 2, 2), (1, 2, math.nan, 2)],
)
def test_bounds_the_wrong_way_round(least: int, most: int, low: float, high: float) -> None:
    with pytest.raises(ValueError, match="right"):
        Scale(least, most, low, high)


def test_times_that_cannot_be() -> None:
    for times in ({"seconds": -1.0}, {"idle": -1.0}, {"idle": math.nan}):
        with pytest.raises(ValueError, match="0 or more is right"):
            Scale(0, 1, **times)
