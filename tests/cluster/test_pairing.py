"""Who gives requests to whom."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvloom.cluster.policies.dispatch import pair
from kvloom.engine.freeness import Thresholds, freeness
from kvloom.types.load import UnitLoad
from kvloom.types.service import Pair
from tests.cluster.loads import PAGE, fleets, model, unit

BAND = Thresholds(out=24, into=48)
thresholds = st.tuples(st.integers(-100, 400), st.integers(0, 400)).map(
    lambda two: Thresholds(two[0], two[0] + two[1])
)


def free(loads: dict[str, UnitLoad]) -> dict[str, float]:
    return {name: freeness(load) for name, load in loads.items()}


def at(steps: float, running: int = 4) -> UnitLoad:
    """A unit of that freeness."""
    used = 1000 - steps * running / PAGE
    return unit(model(running, used_blocks=used))


def paired(loads: dict[str, UnitLoad], *standing: Pair, band: Thresholds = BAND) -> tuple[Pair, ...]:
    return pair(loads, free(loads), standing, band)


def test_the_least_free_with_the_freest() -> None:
    loads = {"a": at(20), "b": at(4), "c": at(30), "d": at(60), "e": at(90), "f": unit(model()), "g": at(8)}
    assert paired(loads) == (Pair("a", "d"), Pair("b", "f"), Pair("g", "e"))


def test_what_starts_up_takes_and_what_drains_gives() -> None:
    loads = {"new": unit(model()), "old": replace(at(500), draining=True), "busy": at(10)}
    assert paired(loads) == (Pair("old", "new"),)
    assert paired({"new": unit(model()), "old": unit(model(), draining=True)}) == ()  # nothing runs there


def test_units_that_do_not_move_requests_are_in_no_pair() -> None:
    """As those of several ranks, which stay out although they have the least and the most room."""
    loads = {
        "least": replace(at(1), moves=False),
        "a": at(20),
        "b": at(60),
        "most": replace(at(90), moves=False),
    }
    assert paired(loads) == (Pair("a", "b"),)
    assert paired(loads, Pair("least", "most"), Pair("a", "most")) == (Pair("a", "b"),)


def test_a_model_that_only_waits_gives_too() -> None:
    """Another one's requests have filled the pool, and the destination does not serve that one."""
    full = unit(model(4, used_blocks=990), model(waiting=1, head_blocks=20, waiting_blocks=20))
    there = unit(model(), names=["m1"])
    found = paired({"full": full, "there": there})
    assert found == (Pair("full", "there"),)
    assert paired({"full": full, "there": there}, *found) == found
    assert paired({"full": unit(model(4, used_blocks=990), model()), "there": there}) == ()


@pytest.mark.parametrize(
    ("source", "destination", "stay"),
    [(23, 49, True), (24, 49, False), (23, 48, False), (25, 47, False), (-5, 900, True)],
)
def test_a_pair_stays_until_a_side_has_recovered(source: float, destination: float, stay: bool) -> None:
    """Though another would be better by now."""
    loads = {"s": at(source), "d": at(destination)}
    standing = Pair("s", "d")
    assert (standing in paired(loads, standing)) is stay
    needier = loads | {"x": at(-900)}
    assert paired(needier, standing) == ((standing,) if stay else (Pair("x", "d"),) * (destination > 48))


def test_a_pair_ends_with_a_unit_that_is_gone_or_drains() -> None:
    standing, loads = Pair("s", "d"), {"s": at(1), "d": at(99)}
    assert paired({"s": loads["s"]}, standing) == ()
    assert paired({"d": loads["d"]}, standing) == ()
    assert paired(loads | {"d": replace(loads["d"], draining=True)}, standing) == ()
    assert paired(loads | {"s": unit(model())}, standing) == ()


def test_a_pair_has_a_model_in_common_that_runs() -> None:
    both = unit(model(4, used_blocks=1000), model(), names=["m", "other"])
    loads = {"s": both, "d": unit(model(), names=["other"]), "e": at(60)}
    assert paired(loads) == (Pair("s", "e"),)
    assert paired(loads, Pair("s", "d")) == (Pair("s", "e"),)


@given(fleets(), thresholds)
def test_what_holds_of_pairs(loads: dict[str, UnitLoad], band: Thresholds) -> None:
    pairs = paired(loads, band=band)
    sides = [side for one in pairs for side in (one.source, one.destination)]
    assert len(set(sides)) == len(sides)  # none with itself, none twice
    for one in pairs:
        assert not loads[one.destination].draining
        assert freeness(loads[one.source]) < band.out <= band.into < freeness(loads[one.destination])
    taking = [free(loads)[one.destination] for one in sorted(pairs, key=lambda p: free(loads)[p.source])]
    if all(len(load.models) == 1 for load in loads.values()):
        assert taking == sorted(taking, reverse=True)


@given(fleets(), fleets(), thresholds)
def test_pairs_do_not_flap(before: dict[str, UnitLoad], now: dict[str, UnitLoad], band: Thresholds) -> None:
    """Whatever came before: with the same reports the pairs stay, and none is turned round."""
    old = paired(before, band=band)
    first = paired(now, *old, band=band)
    again = paired(now, *first, band=band)
    assert first == again
    assert not {Pair(one.destination, one.source) for one in first} & set(again)


@given(fleets(), thresholds)
def test_nobody_is_left_over_who_could_be_paired(loads: dict[str, UnitLoad], band: Thresholds) -> None:
    pairs = paired(loads, band=band)
    sides = {side for one in pairs for side in (one.source, one.destination)}
    rest = {name: load for name, load in loads.items() if name not in sides}
    assert paired(rest, band=band) == ()


class Counted(float):
    """Counts how often it is compared."""

    compared = 0

    def __lt__(self, other: Any) -> bool:
        Counted.compared += 1
        return super().__lt__(other)

    def __gt__(self, other: Any) -> bool:
        Counted.compared += 1
        return super().__gt__(other)

    def __eq__(self, other: Any) -> bool:
        Counted.compared += 1
        return super().__eq__(other)

    __hash__ = float.__hash__


@pytest.mark.parametrize("shape", ["one model", "eight models", "draining"])
def test_a_period_is_n_log_n(shape: str) -> None:
    """Comparisons of freeness, as they grow from 64 to 1,024 units."""

    def compared(units: int) -> int:
        models = 8 if shape == "eight models" else 1
        loads = {}
        for number in range(units):
            used = (number * 7919) % 1000  # in no order
            load = unit(*[model(8 // models, used_blocks=used / models)] * models)
            loads[f"u{number}"] = replace(load, draining=shape == "draining" and number % 2 == 0)
        known = {name: Counted(freeness(load)) for name, load in loads.items()}
        Counted.compared = 0
        pairs = pair(loads, known, (), Thresholds(800, 1000))
        assert len(pairs) > units / 8
        return Counted.compared

    small, large = compared(64), compared(1024)
    assert large / small < 1.5 * 16 * math.log(1024) / math.log(64)


def test_thresholds_leave_nobody_on_both_sides() -> None:
    with pytest.raises(ValueError, match="out ≤ into is right"):
        Thresholds(3, 2)
