"""The share that adapts: within its bounds, quiet where nothing changes, and at zero where it must be."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.engine.batching.job_times import StepTime
from kvloom.offload.policy import CALM, FIRST, IDLE, LONGEST, STEP, Observation, Share, Slowdown, adapted
from kvloom.types.load import STEP_WINDOW
from tests.cluster.loads import model, unit

BOUND = 0.15
slowdowns = st.none() | st.floats(-0.5, 2)
needs = st.sampled_from(["short", "needless", ""])  # nobody who is short could do without
observations = st.builds(
    lambda need, slowdown, pressed: Observation(need == "short", slowdown, pressed, need == "needless"),
    needs,
    slowdowns,
    st.booleans(),
)
shares = st.builds(Share, st.floats(0, 1), st.integers(0, LONGEST), st.integers(FIRST, LONGEST))


@given(shares, observations)
def test_it_stays_within_bounds_and_moves_by_steps(share: Share, seen: Observation) -> None:
    after = adapted(share, seen, BOUND)
    assert 0 <= after.value <= 1
    assert FIRST <= after.patience <= LONGEST
    assert after.value <= share.value + STEP + 1e-6
    if after.value > share.value:
        assert seen.short
        assert not seen.pressed
        assert seen.slowdown is not None
        assert seen.slowdown <= CALM * BOUND
        assert not share.rest


@given(shares, observations)
def test_it_is_zero_where_the_lender_needs_its_memory_or_nobody_knows(
    share: Share, seen: Observation
) -> None:
    if seen.pressed or seen.slowdown is None:
        assert adapted(share, seen, BOUND).value == 0


@given(shares, observations)
def test_on_constant_input_it_comes_to_rest(share: Share, seen: Observation) -> None:
    values = []
    for _ in range(LONGEST + 40):
        values.append(share.value)
        share = adapted(share, seen, BOUND)
    assert values == sorted(values) or values == sorted(values, reverse=True)
    assert len(set(values[-20:])) == 1


@settings(max_examples=40)
@given(st.floats(0, 3), st.floats(0.5, 3))
def test_against_a_lender_that_suffers_it_does_not_swing(slope: float, power: float) -> None:
    """However steep: what was too much is tried less and less often."""

    def suffers(value: float) -> float:
        return float(slope * value**power)

    values = course(lambda value: Observation(True, suffers(value)), 1200)
    changes = [i for i, (a, b) in enumerate(pairwise(values)) if a != b]
    assert len(changes) <= 10 + 2 * 12 + 2 * (1200 // LONGEST)
    too_much = [value for value in values if suffers(value) > BOUND]
    assert len(too_much) <= 12 + 1200 // LONGEST


def test_it_rises_while_blocks_are_short_and_falls_with_the_lender_s_load() -> None:
    values = course(lambda _: Observation(True, 0.0), 30)
    assert values[:3] == [0.0, STEP, 2 * STEP]
    assert values[-1] == 1
    share = Share(0.5)
    for _ in range(5):
        share = adapted(share, Observation(True, 2 * BOUND), BOUND)
    assert share.value == 0
    assert adapted(Share(0.3), Observation(True, 0.9 * BOUND), BOUND).value == 0.3
    assert adapted(Share(0.3), Observation(False, 0.0), BOUND).value == 0.3


def test_once_the_need_is_over_it_falls_slowly_and_a_short_ease_changes_nothing() -> None:
    share, eased, short = Share(0.3), Observation(False, 0.0, needless=True), Observation(True, 0.0)
    for _ in range(3):
        for _ in range(IDLE - 1):
            share = adapted(share, eased, BOUND)
        assert share.value == 0.3
        share = adapted(share, Observation(False, 0.0), BOUND)
    values = []
    for _ in range(3 * IDLE):
        share = adapted(share, eased, BOUND)
        values.append(share.value)
    assert [values.count(value) for value in (0.3, 0.2, 0.1, 0.0)] == [IDLE - 1, IDLE, IDLE, 1]
    assert adapted(share, short, BOUND).value == STEP  # it rises as ever


def course(look: Callable[[float], Observation], count: int) -> list[float]:
    share, values = Share(), []
    for _ in range(count):
        values.append(share.value)
        share = adapted(share, look(share.value), BOUND)
    return values


def test_a_slow_step_does_not_move_the_pace() -> None:
    pace = StepTime()
    assert pace.seconds == 0
    for i in range(3 * STEP_WINDOW):
        pace.note(9.0 if i % 5 == 0 else 1.0)
    assert pace.seconds == 1
    for _ in range(STEP_WINDOW):
        pace.note(2.0)
    assert pace.seconds == 2


def test_slowdown_is_against_steps_with_nothing_away() -> None:
    slowdown, steps = Slowdown(), 100

    def seen(more: int, seconds: float, *, away: bool) -> float | None:
        nonlocal steps
        steps += more
        report = unit(model(running=1, decode_jobs_total=steps, step_seconds=seconds))
        return slowdown.seen(report, offloaded=away)

    assert seen(0, 1.0, away=False) is None
    assert seen(STEP_WINDOW - 1, 1.0, away=False) is None
    assert seen(1, 1.0, away=False) == 0
    assert seen(40, 1.2, away=True) == pytest.approx(0.2)
    assert seen(0, 1.2, away=True) == 0  # it has nothing to do
    assert seen(3, 1.5, away=False) == pytest.approx(0.5)  # still the steps of before
    assert seen(STEP_WINDOW, 1.5, away=False) == 0  # it has more to do now, for itself
    steps = 0
    assert seen(1, 1.0, away=True) is None  # another process


def test_the_model_that_suffers_most_counts() -> None:
    slowdown = Slowdown()
    for steps, seconds in ((0, 1.0), (STEP_WINDOW, 1.0), (2 * STEP_WINDOW, 1.1)):
        models = (
            model(decode_jobs_total=steps, step_seconds=seconds),
            model(decode_jobs_total=steps, step_seconds=seconds**3),
        )
        found = slowdown.seen(unit(*models), offloaded=steps > STEP_WINDOW)
    assert found == pytest.approx(1.1**3 - 1)
