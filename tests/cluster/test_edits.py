"""Edits change what they name and nothing else; of two at once the last one wins, field by field."""

from __future__ import annotations

import pytest

from kvloom.cluster.edits import Edit, UnitEdit, edited
from kvloom.cluster.state import FleetSpec, Rolling, UnitSpec
from kvloom.types.errors import BadRequest, Conflict
from kvloom.types.spec import ProgramSpec
from tests.cluster.histories import engine

SPEC = FleetSpec(units={"a": UnitSpec(engine=engine("a"))}, revision=7)


def test_two_at_once_merge_field_by_field() -> None:
    first, overrode = edited(SPEC, Edit(base=7, units={"a": UnitEdit(drained=True, seconds=5.0)}))
    assert overrode == ()
    second, overrode = edited(first, Edit(base=7, units={"a": UnitEdit(wanted=False, seconds=9.0)}))
    assert overrode == ("a.seconds",)
    unit = second.units["a"]
    assert (unit.drained, unit.wanted, unit.seconds, second.revision) == (True, False, 9.0, 9)
    _, overrode = edited(second, Edit(base=9, units={"a": UnitEdit(seconds=3.0)}))
    assert overrode == ()
    third, overrode = edited(second, Edit(base=7, program=ProgramSpec("balanced")))
    assert overrode == ()
    _, overrode = edited(third, Edit(base=7, program=None))
    assert overrode == ("program",)


def test_another_specification_is_another_generation() -> None:
    made, _ = edited(SPEC, Edit(units={"a": UnitEdit(engine=engine("a", "m", "n"))}))
    assert (made.units["a"].generation, made.units["a"].edition) == (2, 2)
    same, _ = edited(SPEC, Edit(units={"a": UnitEdit(engine=engine("a"))}))
    assert same.units["a"].generation == 1
    again, _ = edited(made, Edit(units={"a": UnitEdit(restart=True)}))
    assert (again.units["a"].generation, again.units["a"].edition) == (3, 2)


@pytest.mark.parametrize("name", ["../z", "", "z/z", "z" * 65, "gateway", "scheduler"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(BadRequest, match="is no name for a unit"):
        edited(SPEC, Edit(units={name: UnitEdit(engine=engine("z"))}))


def test_what_cannot_be_done() -> None:
    with pytest.raises(Conflict, match="there is a unit a already; another name is right"):
        edited(SPEC, Edit(units={"a": UnitEdit(engine=engine("a"), add=True)}))
    with pytest.raises(Conflict, match="there is no unit z"):
        edited(SPEC, Edit(units={"z": UnitEdit(drained=True)}))
    rolling, _ = edited(SPEC, Edit(rolling=Rolling(left=("a", "gateway"))))
    with pytest.raises(Conflict, match="a rolling restart is under way, at a; ask again"):
        edited(rolling, Edit(rolling=Rolling(left=("gateway",))))


def test_what_is_removed_and_wanted_again_stays() -> None:
    gone, _ = edited(SPEC, Edit(units={"a": UnitEdit(remove=True)}))
    assert (gone.units["a"].wanted, gone.units["a"].removed) == (False, True)
    back, _ = edited(gone, Edit(units={"a": UnitEdit(wanted=True)}))
    assert (back.units["a"].wanted, back.units["a"].removed) == (True, False)
