"""From one placement to another: nobody loses a unit without need, and memory is never exceeded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kvloom.plan.repair import Placed, StartUnit, Step, StopUnit, Unreachable, repair


def unit(models: str, size: int = 4, form: int = 0) -> Placed:
    return Placed(tuple(models), size, (form,))


def named(*units: Placed) -> dict[str, Placed]:
    return {f"unit-{number}": one for number, one in enumerate(units)}


def states(
    now: Mapping[str, Placed], plan: Sequence[Placed], steps: Sequence[Step]
) -> Iterator[tuple[list[Placed], set[str]]]:
    """Yields what is there after each step, and the models that were served and have no unit then."""
    there: dict[object, Placed] = dict(now.items())
    served = {model for one in now.values() for model in one.models}
    for step in steps:
        if isinstance(step, StartUnit):
            there[step.unit] = plan[step.unit]
        else:
            del there[step.unit]
        yield sorted(there.values()), served - {model for one in there.values() for model in one.models}


def keeps_all_served(
    now: Mapping[str, Placed], plan: Sequence[Placed], steps: Sequence[Step], memory: int
) -> bool:
    """Whether these steps need no more memory than there is, and leave no model without a unit."""
    after = states(now, plan, steps)
    return all(sum(one.bytes for one in there) <= memory and not missing for there, missing in after)


def check_way(now: Mapping[str, Placed], plan: Sequence[Placed], steps: Sequence[Step], memory: int) -> None:
    """The steps lead to the plan, need no more memory than there is, and tell rightly who waits."""
    there, waiting = sorted(now.values()), set[str]()
    for step, (after, missing) in zip(steps, states(now, plan, steps), strict=True):
        if isinstance(step, StartUnit):
            assert sum(one.bytes for one in after) <= memory
        else:
            assert set(step.waits) == missing - waiting
        there, waiting = after, missing
    assert there == sorted(plan)


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
    check_way(now, plan, found.steps, memory)
    if not keeps_all_served(now, plan, found.steps, memory) and len(found.steps) <= 6:
        assert not any(keeps_all_served(now, plan, order, memory) for order in permutations(found.steps))


def test_many_units_take_no_longer_than_they_may() -> None:
    now = named(*[unit("abcdefgh"[at % 8], 4, at) for at in range(40)])
    plan = [unit("abcdefgh"[at % 8], 4, 100 + at) for at in range(40)]
    found = repair(now, plan, 164)
    check_way(now, plan, found.steps, 164)
    assert keeps_all_served(now, plan, found.steps, 164)
