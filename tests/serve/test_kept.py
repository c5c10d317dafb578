"""What a gateway's successor is told to go on with."""

from __future__ import annotations

from kvloom.serve.kept import Kept
from kvloom.serve.orders import Standing
from kvloom.types.spec import ProgramSpec


def test_what_stands_is_told_each_time() -> None:
    told: list[Standing] = []
    kept = Kept(Standing(), told.append)
    kept.program(ProgramSpec("balanced"))
    kept.drained(frozenset({"a", "b"}))
    assert told[-1] == Standing(program=ProgramSpec("balanced"), drained=frozenset({"a", "b"}))
    assert kept.standing == told[-1]
    assert len(told) == 2


def test_a_unit_that_is_stopped_is_no_longer_drained() -> None:
    """Where it is started again it takes requests, under a successor as well."""
    kept = Kept(Standing(drained=frozenset({"a", "b"})), lambda _: None)
    kept.leaving({"a": 3.0})
    assert kept.standing == Standing(drained=frozenset({"b"}), leaving={"a": 3.0})
    kept.leaving({})
    assert kept.standing == Standing(drained=frozenset({"b"}))
