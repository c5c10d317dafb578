"""Where a new request goes."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvloom.cluster.policies.dispatch import Dispatch, freest, infaas
from kvloom.engine.freeness import Arrival, freeness, headroom, wanted
from kvloom.types.load import LevelLoad, UnitLoad
from kvloom.types.request import Level
from tests.cluster.loads import arrivals, fleets, model, unit, unit_loads

POLICIES = [freest, infaas]
ONE = Arrival("m", 160)
HIGH = Level(-1, 800 * 16)
URGENT = Arrival("m", 160, priority=-1)


def zeros(loads: dict[str, UnitLoad]) -> dict[str, int]:
    return dict.fromkeys(loads, 0)


@pytest.mark.parametrize("policy", POLICIES)
@given(loads=fleets(), arrival=arrivals)
def test_a_draining_unit_gets_nothing(
    policy: Dispatch[str], loads: dict[str, UnitLoad], arrival: Arrival
) -> None:
    chosen = policy(loads, zeros(loads), arrival)
    if chosen is None:
        assert all(load.draining for load in loads.values())
    else:
        assert not loads[chosen].draining


@given(fleets(), arrivals)
def test_to_the_one_that_is_freest_then(loads: dict[str, UnitLoad], arrival: Arrival) -> None:
    """Of those that hold it where its level brings least headroom."""
    chosen = freest(loads, zeros(loads), arrival)
    if chosen is None:
        return
    free = {name: freeness(arrival.placed(load)) for name, load in loads.items()}
    brings = {name: max(0.0, _brought(arrival, load)) for name, load in loads.items() if free[name] >= 1e-6}
    if brings:
        assert brings[chosen] <= min(brings.values()) + 1
        rivals = [free[name] for name, more in brings.items() if more <= brings[chosen] - 1]
        assert not rivals
        rivals = [free[name] for name, more in brings.items() if more == 0 == brings[chosen]]
        assert free[chosen] >= max(rivals, default=-math.inf) * (1 - 1e-9)


def _brought(arrival: Arrival, load: UnitLoad) -> float:
    """Tokens of headroom."""
    return (headroom(arrival.placed(load)) - headroom(load)) / load.models["m"].token_blocks


@given(fleets(), st.integers(1, 2000), st.integers(1, 4))
def test_plain_requests_go_to_the_freest(loads: dict[str, UnitLoad], prompt: int, choices: int) -> None:
    arrival = Arrival("m", prompt, choices)
    chosen = freest(loads, zeros(loads), arrival)
    free = {name: freeness(arrival.placed(load)) for name, load in loads.items()}
    assert chosen is None or max(free.values()) < 0 or free[chosen] == pytest.approx(max(free.values()))


@given(fleets(), arrivals)
def test_where_nobody_holds_it_all_that_waits_counts(loads: dict[str, UnitLoad], arrival: Arrival) -> None:
    chosen = freest(loads, zeros(loads), arrival)
    open_ = {name: arrival.placed(load) for name, load in loads.items() if not load.draining}
    if chosen is None or max(map(freeness, open_.values())) >= 0:
        return
    lacks = {
        name: (wanted(load) + headroom(load) - load.total_blocks)
        / max(one.token_blocks for one in load.models.values())
        for name, load in open_.items()
    }
    assert lacks[chosen] == pytest.approx(min(lacks.values()))


def test_a_short_head_hides_no_queue() -> None:
    """Of two units that are full the one where less waits in all, though its first wants more."""
    loads = {
        "hidden": unit(model(8, 15_900, waiting=9, head_blocks=10, waiting_blocks=2_000)),
        "plain": unit(model(8, 15_900, waiting=1, head_blocks=300, waiting_blocks=300)),
    }
    assert freest(loads, zeros(loads), ONE) == "plain"


@given(fleets(), arrivals, st.data())
def test_more_headroom_makes_no_unit_the_choice(
    loads: dict[str, UnitLoad], arrival: Arrival, data: st.DataObject
) -> None:
    """Whether it is of those that run there, or of those that may come."""
    if not loads:
        return
    chosen, name = freest(loads, zeros(loads), arrival), data.draw(st.sampled_from(sorted(loads)))
    more = data.draw(st.integers(1, 5000))
    load = loads[name]
    roomier = replace(
        load,
        priorities=tuple(replace(one, headroom=one.headroom + more) for one in load.priorities),
        models={
            served: replace(
                own, levels=tuple(replace(one, headroom=one.headroom + more) for one in own.levels)
            )
            for served, own in load.models.items()
        },
    )
    if name != chosen:
        assert freest(loads | {name: roomier}, zeros(loads), arrival) == chosen


@pytest.mark.parametrize("policy", POLICIES)
def test_equals_are_chosen_in_turn(policy: Dispatch[str]) -> None:
    loads = {name: unit(model(2, 320)) for name in "abc"}
    turns, seen = zeros(loads), []
    for number in range(1, 7):
        chosen = policy(loads, turns, ONE)
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
    assert freest(loads, turns, ONE) == "queue"
    assert infaas(loads, turns, ONE) == "many"
    del loads["queue"]
    assert freest(loads, turns, ONE) == "few"


@given(unit_loads(), arrivals)
def test_what_was_sent_counts(load: UnitLoad, arrival: Arrival) -> None:
    """Who has got something is no more the freest among equals, and its memory is fuller. With the first of a
    level comes headroom that the second need not bring."""
    serving = replace(load, draining=False, priorities=())
    loads = {"fuller": arrival.placed(serving), "same": serving}
    turns = {"fuller": 0, "same": 1}
    assert infaas(loads, turns, arrival) == "same"
    assert freest(loads, turns, arrival) == "same"


def test_many_sent_between_two_reports_are_spread() -> None:
    loads = {"a": unit(model(4, 640)), "b": unit(model(2, 320)), "c": unit(model())}
    seen: Counter[str] = Counter()
    for number in range(30):
        chosen = freest(loads, zeros(loads) | {"c": number}, ONE)
        assert chosen is not None
        seen[chosen] += 1
        loads[chosen] = ONE.placed(loads[chosen])
    assert {name: loads[name].running for name in loads} == {"a": 12, "b": 12, "c": 12}


def test_urgent_requests_gather_and_the_others_keep_away() -> None:
    """An urgent one runs at a: by freeness as it is, a would be the last for all."""
    level = LevelLoad(priority=-1, headroom=HIGH.headroom, running=1)
    loads = {"a": unit(model(4, 16 * 300, levels=(level,)), priorities=(HIGH,))}
    loads |= {name: unit(model(5, 16 * 500), priorities=(HIGH,)) for name in "bc"}
    assert min(loads, key=lambda name: freeness(loads[name])) == "a"
    seen = []
    for number in range(26):
        arrival = URGENT if number % 2 else ONE
        chosen = freest(loads, zeros(loads), arrival)
        assert chosen is not None
        seen.append(chosen)
        loads[chosen] = arrival.placed(loads[chosen])
    assert set(seen[1::2]) == {"a"}
    assert Counter(seen[::2]) == {"b": 7, "c": 6}


@given(st.integers(2, 16), st.integers(0, 20), st.integers(0, 200), st.integers(1, 400), st.integers(1, 4))
def test_urgent_requests_gather_where_all_are_equal(
    units: int, running: int, pages: int, prompt: int, choices: int
) -> None:
    """On one until its load is the target, all of the pool but the headroom; then on the next."""
    pages = max(pages, running)
    load = unit(model(running, 16 * pages), blocks=1000, priorities=(HIGH,))
    loads = {f"u{at:02}": load for at in range(units)}
    urgent, need = Arrival("m", prompt, choices, priority=-1), -(-prompt // 16)
    fits = max(0, (200 - pages) // need)  # on each
    seen: Counter[str] = Counter()
    order: list[str] = []
    for _ in range(min(40, fits * units)):
        chosen = freest(loads, zeros(loads), urgent)
        assert chosen is not None
        loads[chosen] = urgent.placed(loads[chosen])
        if not seen[chosen]:
            assert all(seen[full] == fits for full in order), "the others before it are full"
            order.append(chosen)
        seen[chosen] += 1
    assert not seen or max(seen.values()) <= fits


def test_plain_requests_keep_away_from_urgent_ones_where_all_are_equal() -> None:
    """Sixteen urgent ones gather on one of sixteen units; sixteen plain ones share the rest."""
    loads = {f"u{at:02}": unit(model(4, 16 * 20), priorities=(HIGH,)) for at in range(16)}
    for arrival, where in ((URGENT, 1), (ONE, 15)):
        seen: Counter[str] = Counter()
        for _ in range(15):
            chosen = freest(loads, zeros(loads), arrival)
            assert chosen is not None
            loads[chosen] = arrival.placed(loads[chosen])
            seen[chosen] += 1
        assert len(seen) == where
    assert loads["u00"].running == 4 + 15


def test_where_all_have_headroom_the_emptiest_gets_what_is_urgent() -> None:
    """However many run there: what is missing is not divided among them."""
    level = LevelLoad(priority=-1, headroom=HIGH.headroom, running=1)
    used = {"few": (2, 410), "many": (40, 420), "none": (3, 400)}
    loads = {
        name: unit(model(running, 16 * pages, levels=(level,) * (name != "none")), priorities=(HIGH,))
        for name, (running, pages) in used.items()
    }
    assert freest(loads, zeros(loads), URGENT) == "none"
    del loads["none"]
    assert freest(loads, zeros(loads), URGENT) == "few"
    assert freest(loads, zeros(loads), ONE) == "few"
