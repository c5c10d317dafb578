"""One period of the fleet scheduler: all decisions together."""

from __future__ import annotations

from msgspec.structs import replace

from kvloom.core.rescheduling import Pair
from kvloom.fleet.period import Group, Period, decide
from kvloom.fleet.scaling import Drain, Scale, Start
from kvloom.fleet.thresholds import Thresholds
from tests.fleet.loads import model, unit

BAND = Thresholds()


def test_a_period() -> None:
    scale = Scale(least=1, most=3, low=100, high=400, seconds=10)
    groups = {"x": Group(frozenset("ab"), scale), "y": Group(frozenset("cde"), scale)}
    loads = {
        "a": unit(model(4, 16 * 999)),
        "b": unit(model(4, 16 * 985)),
        "c": unit(model(), names=["other"]),
        "d": unit(model(1, 16), names=["other"]),
    }
    first = decide(loads, Period(), 0.0, BAND, groups)
    assert first.pairs == (Pair("a", "b"),)
    assert not first.steps
    second = decide(loads, first, 10.0, BAND, groups)
    assert second.steps == {"x": Start(), "y": Drain("c")}
    drained = loads | {"d": replace(loads["d"], draining=True)}
    third = decide(drained, second, 11.0, BAND, groups)
    assert third.pairs == (Pair("a", "b"), Pair("d", "c"))
    needier = drained | {"e": unit(model(9, 16 * 1000), names=["other"])}
    fourth = decide(needier | {"d": loads["d"]}, first, 12.0, BAND)
    assert Pair("e", "c") in fourth.pairs
    assert Pair("d", "c") in decide(needier, third, 12.0, BAND).pairs  # it stays
    assert decide({}, third, 12.0, BAND).pairs == ()
