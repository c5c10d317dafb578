"""One period of the fleet scheduler: all decisions together."""

from __future__ import annotations

from msgspec.structs import replace

from kvloom.cluster.policies.autoscale import AddReplicas, RemoveReplica
from kvloom.cluster.scheduler import Period, carried_out, decide
from kvloom.engine.freeness import Thresholds
from kvloom.lab.reproduce.llumnix.systems import published_freeness
from kvloom.types.service import Pair, Scale, Steps, UnitGroup
from tests.cluster.loads import model, unit

BAND = Thresholds()


def test_a_period() -> None:
    scale = Scale(least=1, most=3, low=100, high=400, seconds=10)
    groups = {"x": UnitGroup(frozenset("ab"), scale), "y": UnitGroup(frozenset("cde"), scale)}
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
    assert second.steps == {"x": AddReplicas(), "y": RemoveReplica("c")}
    drained = loads | {"d": replace(loads["d"], draining=True)}
    third = decide(drained, second, 11.0, BAND, groups)
    assert third.pairs == (Pair("a", "b"), Pair("d", "c"))
    needier = drained | {"e": unit(model(9, 16 * 1000), names=["other"])}
    fourth = decide(needier | {"d": loads["d"]}, first, 12.0, BAND)
    assert Pair("e", "c") in fourth.pairs
    assert Pair("d", "c") in decide(needier, third, 12.0, BAND).pairs  # it stays
    assert decide({}, third, 12.0, BAND).pairs == ()


def test_units_are_paired_by_the_measure_that_is_given() -> None:
    """By the paper's, what is missing is divided by the batch."""
    loads = {
        "crowd": unit(model(10, 16 * 1000, waiting=1, head_blocks=50, waiting_blocks=50)),
        "few": unit(model(1, 16 * 1000, waiting=1, head_blocks=20, waiting_blocks=20)),
        "idle": unit(model()),
    }
    assert decide(loads, Period(), 0.0, BAND).pairs == (Pair("crowd", "idle"),)
    assert decide(loads, Period(), 0.0, BAND, measure=published_freeness).pairs == (Pair("few", "idle"),)


def test_of_several_groups_that_serve_a_model_the_first_is_started() -> None:
    scale = Scale(least=0, most=2, idle=60)
    both = {
        "x": UnitGroup(frozenset("ab"), scale, away=("b", "a"), models=frozenset({"m", "n"})),
        "y": UnitGroup(frozenset("c"), scale, away=("c",), models=frozenset({"m", "o"})),
    }
    for waiting, started in (({"m": 1}, "b"), ({"o": 1, "m": 0}, "c"), ({"m": 1, "o": 1}, "bc"), ({}, "")):
        steps = decide({}, Period(), 0.0, BAND, both, waiting).steps
        assert carried_out(steps, both) == Steps(start=tuple(started))
    starting = both | {"x": replace(both["x"], starting=1)}
    assert not decide({}, Period(), 0.0, BAND, starting, {"m": 1}).steps
    stuck = both | {"x": replace(both["x"], away=())}  # as when its units have failed to start
    assert carried_out(decide({}, Period(), 0.0, BAND, stuck, {"m": 1}).steps, stuck) == Steps(start=("c",))
    none = {"x": replace(both["x"], away=())}
    assert carried_out(decide({}, Period(), 0.0, BAND, none, {"m": 1}).steps, none) == Steps()


def test_what_is_idle_is_stopped() -> None:
    group = UnitGroup(frozenset("ab"), Scale(least=0, most=2, idle=60), idle=61.0)
    steps = decide({"a": unit(model())}, Period(), 0.0, BAND, {"x": group}).steps
    assert carried_out(steps, {"x": group}) == Steps(stop=("a",))
