"""What drafts may cost, whatever was expected of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvloom.engine.drafts.lengths import LossBudget

RESERVE, PART = 4.0, 0.02  # steps at once, and of all steps without drafts

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
        assert lost <= RESERVE + PART * earned + MOST_LOST


def test_drafts_that_lose_come_back_after_steps_without_them() -> None:
    budget = LossBudget()
    for _ in range(5):
        budget.note(2.0, 1.0)
    assert budget.spent
    budget.earn(49)
    assert budget.spent
    budget.earn(2)
    assert not budget.spent


def test_a_step_that_stood_still_ends_drafts_for_a_moment_alone() -> None:
    budget = LossBudget()
    budget.note(1000.0, 1.0)
    assert budget.spent
    budget.earn(1)
    assert not budget.spent


def test_gains_cannot_be_saved_up() -> None:
    budget = LossBudget()
    for _ in range(100):
        budget.note(1.0, 8.0)
    for _ in range(4):
        budget.note(2.0, 1.0)
    assert budget.spent
