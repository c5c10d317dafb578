"""Where a new request goes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvloom.core.load import LevelLoad, UnitLoad
from kvloom.core.priority import Level, level_of
from kvloom.fleet.dispatch import Dispatch, after, freest, infaas, round_robin
from kvloom.fleet.freeness import freeness
from tests.fleet.loads import fleets, model, unit, unit_loads

POLICIES = [freest, round_robin, infaas]


def zeros(loads: dict[str, UnitLoad]) -> dict[str, int]:
    return dict.fromkeys(loads, 0)


@pytest.mark.parametrize("policy", POLICIES)
@given(loads=fleets())
def test_a_draining_unit_gets_nothing(policy: Dispatch[str], loads: dict[str, UnitLoad]) -> None:
    chosen = policy(loads, zeros(loads))
    if chosen is None:
        assert all(load.draining for load in loads.values())
    else:
        assert not loads[chosen].draining


@given(fleets())
def test_to_the_freest(loads: dict[str, UnitLoad]) -> None:
    chosen = freest(loads, zeros(loads))
    if chosen is not None:
        assert freeness(loads[chosen]) == max(freeness(load) for load in loads.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_equals_are_chosen_in_turn(policy: Dispatch[str]) -> None:
    loads = {name: unit(model(2, 320)) for name in "abc"}
    turns, seen = zeros(loads), []
    for number in range(1, 7):
        chosen = policy(loads, turns)
        assert chosen is not None
        turns[chosen] = number
        seen.append(chosen)
    assert seen == ["a", "b", "c"] * 2


def test_what_tells_them_apart() -> None:
    """Many short requests leave a step less room than few long ones; a queue does too, but only its head."""
    loads = {
        "many": unit(model(50, 50 * 160)),
        "few": unit(model(2, 2 * 4800)),
        "queue": unit(model(2, 2 * 320, waiting=9, head_blocks=20, waiting_blocks=900)),
    }
    turns = {"many": 0, "few": 1, "queue": 2}
    assert freest(loads, turns) == "queue"
    assert infaas(loads, turns) == "many"
    assert round_robin(loads, turns) == "many"
    del loads["queue"]
    assert freest(loads, turns) == "few"


@given(unit_loads(), st.integers(1, 8), st.integers(1, 200))
def test_what_was_sent_counts(load: UnitLoad, sequences: int, pages: int) -> None:
    """Who has got something is no more the freest among equals, and its memory is fuller."""
    serving = replace(load, draining=False)
    fuller = after(serving, "m", sequences, pages * serving.models["m"].page_blocks)
    turns = {"fuller": 0, "same": 1}
    assert infaas({"fuller": fuller, "same": serving}, turns) == "same"
    if freeness(serving) >= 0 and serving.running:
        assert freest({"fuller": fuller, "same": serving}, turns) == "same"


def test_many_sent_between_two_reports_are_spread() -> None:
    loads = {"a": unit(model(4, 640)), "b": unit(model(2, 320)), "c": unit(model())}
    seen: Counter[str] = Counter()
    for number in range(30):
        chosen = freest(loads, zeros(loads) | {"c": number})
        assert chosen is not None
        seen[chosen] += 1
        loads[chosen] = after(loads[chosen], "m", 1, 10)
    assert {name: loads[name].running for name in loads} == {"a": 12, "b": 12, "c": 12}


def test_headroom_comes_once_with_the_first_of_its_level() -> None:
    high = Level(-1, 1600)
    one = after(unit(model(3, 480)), "m", 1, 10, high)
    two = after(one, "m", 2, 20, high)
    assert two.models["m"].levels == (LevelLoad(priority=-1, headroom=1600, running=3),)
    assert freeness(one) == (1000 - 30 - 10 - 100) / 4 * 16
    assert freeness(two) == (1000 - 30 - 30 - 100) / 6 * 16


LEVELS = (Level(-1, 1600), Level(-10, 8000))


@pytest.mark.parametrize(
    ("priority", "level"), [(5, None), (0, None), (-1, -1), (-9, -1), (-10, -10), (-99, -10)]
)
@pytest.mark.parametrize("levels", [LEVELS, LEVELS[::-1]])
def test_a_level_holds_for_all_that_is_more_urgent(
    priority: int, level: int | None, levels: tuple[Level, ...]
) -> None:
    found = level_of(priority, levels)
    assert (found and found.priority) == level
