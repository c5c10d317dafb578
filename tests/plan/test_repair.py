"""From one placement to another: nobody loses a unit without need, and memory is never exceeded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kvloom.plan.repair import Placed, StartUnit, Step, StopUnit, Unreachable, repair


def unit(models: str, size: int = 4, form: int = 0) -> Placed:
    return Placed(tuple(models), size, (form,))


def named(*units: Placed) -> dict[str, Placed]:
    return {f"unit-{number}": one for number, one in enumerate(units)}


def walked(
    now: Mapping[str, Placed], plan: Sequence[Placed], steps: Sequence[Step], memory: int
) -> tuple[list[Placed], bool]:
    """What is there in the end, and whether each model that was served always had a unit. Fails where a step
    takes more memory than there is, or tells wrongly who waits."""
    there: dict[object, Placed] = {}
    there.update(now)
    served = {model for one in now.values() for model in one.models}
    waiting: set[str] = set()
    whole = True
    for step in steps:
        if isinstance(step, StartUnit):
            there[step.unit] = plan[step.unit]
            assert sum(one.bytes for one in there.values()) <= memory
        else:
            del there[step.unit]
        missing = served - {model for one in there.values() for model in one.models}
        if isinstance(step, StopUnit):
            assert set(step.waits) == missing - waiting
        waiting = missing
        whole = whole and not missing
    return sorted(there.values()), whole


def test_a_unit_that_holds_both_takes_the_place_of_two() -> None:
    now = named(unit("a"), unit("b"))
    found = repair(now, [unit("ab")], 12)
    assert found.steps == (StartUnit(0), StopUnit("unit-1"), StopUnit("unit-0"))
    assert not found.kept


def test_what_is_as_it_should_be_stays() -> None:
    now = named(unit("a"), unit("b"), unit("a"))
    found = repair(now, [unit("a"), unit("a"), unit("b", form=1)], 16)
    assert found.kept == {"unit-0": 0, "unit-2": 1}
    assert found.steps == (StartUnit(2), StopUnit("unit-1"))
    assert repair(now, now.values(), 12).steps == ()


def test_room_is_made_first_where_others_serve_meanwhile() -> None:
    found = repair(named(unit("a"), unit("a")), [unit("ab", 8)], 8)
    assert found.steps[0] == StopUnit("unit-1")
    assert found.steps[-1] == StartUnit(0)
    assert repair(named(unit("a"), unit("a", 8)), [unit("ab", 8)], 12).steps == (
        StopUnit("unit-1"),
        StartUnit(0),
        StopUnit("unit-0"),
    )


def test_who_waits_is_said() -> None:
    found = repair(named(unit("a"), unit("bc")), [unit("abc", 8)], 8)
    assert found.steps == (StopUnit("unit-0", ("a",)), StopUnit("unit-1", ("b", "c")), StartUnit(0))


def test_a_plan_that_cannot_be_reached() -> None:
    with pytest.raises(Unreachable, match="take 9 bytes, and there are 8"):
        repair(named(unit("a")), [unit("a", 9)], 8)
    with pytest.raises(Unreachable, match="no unit for b, c, which"):
        repair(named(unit("abc")), [unit("a")], 8)


units = st.builds(
    unit, st.sets(st.sampled_from("abc"), min_size=1).map(sorted).map("".join), st.integers(1, 6), st.just(0)
)


@given(st.lists(units, min_size=1, max_size=4), st.lists(units, min_size=1, max_size=4), st.integers(1, 30))
@example([unit("a", 4), unit("b", 4)], [unit("b", 4), unit("a", 2), unit("ab", 6)], 12)
def test_every_way_ends_at_the_plan(before: list[Placed], plan: list[Placed], memory: int) -> None:
    now = named(*before)
    served = {model for one in before for model in one.models}
    assume(served <= {model for one in plan for model in one.models})
    assume(sum(one.bytes for one in plan) <= memory and sum(one.bytes for one in before) <= memory)
    found = repair(now, plan, memory)
    assert len(found.steps) == len(now) + len(plan) - 2 * len(found.kept)
    there, whole = walked(now, plan, found.steps, memory)
    assert there == sorted(plan)
    if not whole and len(found.steps) <= 6:
        assert not any(_whole(now, plan, order, memory) for order in permutations(found.steps))


def _whole(now: Mapping[str, Placed], plan: Sequence[Placed], order: Sequence[Step], memory: int) -> bool:
    there: dict[object, Placed] = {}
    there.update(now)
    served = {model for one in now.values() for model in one.models}
    for step in order:
        if isinstance(step, StartUnit):
            there[step.unit] = plan[step.unit]
        else:
            del there[step.unit]
        if sum(one.bytes for one in there.values()) > memory:
            return False
        if not served <= {model for one in there.values() for model in one.models}:
            return False
    return True


def test_many_units_take_no_longer_than_they_may() -> None:
    now = named(*[unit("abcdefgh"[at % 8], 4, at) for at in range(40)])
    plan = [unit("abcdefgh"[at % 8], 4, 100 + at) for at in range(40)]
    found = repair(now, plan, 164)
    there, whole = walked(now, plan, found.steps, 164)
    assert whole
    assert there == sorted(plan)
