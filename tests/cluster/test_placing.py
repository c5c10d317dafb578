"""A load once more runs there."""

from __future__ import annotations

import pytest
from hypothesis import given

from kvloom.engine.freeness import Arrival, after, freeness, headroom, held
from kvloom.types.load import LevelLoad, UnitLoad
from kvloom.types.request import Level, level_of
from tests.cluster.loads import arrivals, model, unit, unit_loads


@given(unit_loads(), arrivals)
def test_a_request_takes_its_prompt_once_and_room_of_its_level(load: UnitLoad, arrival: Arrival) -> None:
    placed, own = arrival.placed(load), load.models["m"]
    assert placed.running == load.running + arrival.choices
    assert held(placed) == held(load) + own.blocks(arrival.prompt)
    level = level_of(arrival.priority, load.priorities)
    if level and not any(one.priority == level.priority for m in load.models.values() for one in m.levels):
        assert headroom(placed) == pytest.approx(headroom(load) + level.headroom * own.token_blocks)
    if level is None:
        assert headroom(placed) == headroom(load)


@given(unit_loads(), arrivals)
def test_what_a_load_would_be_is_known_before_it_is_made(load: UnitLoad, arrival: Arrival) -> None:
    placed = arrival.placed(load)
    assert arrival.freeness(load) == pytest.approx(freeness(placed), rel=1e-6, abs=1e-6)
    more = (headroom(placed) - headroom(load)) / load.models["m"].token_blocks
    assert abs(arrival.headroom(load) - max(0.0, more)) <= 0.51
    stranger = Arrival("other", 160, priority=-1)
    assert (stranger.freeness(load), stranger.headroom(load)) == (freeness(load), 0)


def test_where_its_model_is_not_served_nothing_changes() -> None:
    load = unit(model(3, 480))
    assert Arrival("other", 160).placed(load) is load


@given(unit_loads(), arrivals)
def test_no_request_makes_a_unit_freer_unless_it_joins_its_level(load: UnitLoad, arrival: Arrival) -> None:
    """Who joins a level shares its headroom; of another model it may be less in blocks."""
    if level_of(arrival.priority, load.priorities) is None and load.running:
        assert freeness(arrival.placed(load)) <= freeness(load)


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
