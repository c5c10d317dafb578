"""What drafts may cost, whatever was expected of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvloom.engine.drafts.lengths import LossBudget, StepTimes

SAVED = 8.0  # steps that may be lost at first, and at most
PART = 0.01  # of all steps without drafts that may be lost
MOST_LOST = 3.0  # by one of STEPS
STEPS = st.tuples(st.floats(0.5, 4.0), st.floats(1.0, 8.0))  # the time and the tokens of one with drafts


@given(st.lists(STEPS, min_size=1, max_size=300), st.integers(1, 4))
def test_losses_stay_within_the_budget(drafted: list[tuple[float, float]], plain: int) -> None:
    """Drafts are made as often as they may be, with as many steps without them after each."""
    budget, lost, earned = LossBudget(), 0.0, 0
    for took, made in drafted:
        if not budget.spent:
            budget.note(took, made)
            lost += took - made
        budget.earn(plain)
        earned += plain
        assert lost <= SAVED + PART * earned + MOST_LOST


def test_drafts_that_lose_come_back_after_steps_without_them() -> None:
    budget = LossBudget()
    for _ in range(9):
        budget.note(2.0, 1.0)
    assert budget.spent
    budget.earn(99)
    assert budget.spent
    budget.earn(2)
    assert not budget.spent


def test_a_step_that_stood_still_ends_drafts_for_a_moment_alone() -> None:
    budget = LossBudget()
    budget.note(1000.0, 1.0)
    assert budget.spent
    budget.earn(1)
    assert not budget.spent


def test_gains_are_saved_up_to_a_bound() -> None:
    budget = LossBudget()
    for _ in range(100):
        budget.note(1.0, 8.0)
    for left in range(int(SAVED), 0, -1):
        assert not budget.spent, left
        budget.note(2.0, 1.0)
    assert budget.spent


def test_steps_that_the_machine_made_longer_make_no_step_expected_longer() -> None:
    times = StepTimes()
    for seconds in (1.0, 3.0, 2.5, 4.0, 1.1, 6.0):
        times.note(4, seconds)
    assert times.expected(4, 4) == [1.0]
