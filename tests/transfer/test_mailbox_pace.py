"""What the ends of a mailbox tell each other of time."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvloom.offload.memory.lender import Task
from tests.transfer.loans import GEOMETRY, HEADS, Lender, begin, borrowed, lender_here, memory_of

_QKV = np.ones((1, HEADS + 2 * GEOMETRY.kv_heads, GEOMETRY.head_dim), np.float32)


def found(made: Lender) -> Task:
    task = made.lending.receiver.next()
    assert task is not None
    return task


def test_a_task_says_when_it_was_posted_and_a_sheet_how_long_things_take() -> None:
    out = np.empty((1, HEADS, GEOMETRY.head_dim), np.float32)
    with lender_here() as made:
        loan, receiver = borrowed(made.lending.loan), made.lending.receiver
        for turn in range(3):
            before = time.monotonic_ns()
            begin(loan, [3])
            number = loan.tasks.post(0, _QKV, 1.0, 0, 0.0)
            task = found(made)
            assert before <= task.posted <= time.monotonic_ns()
            assert (receiver.period > 0) == (receiver.meanwhile > 0) == (turn > 0)
            assert receiver.meanwhile <= receiver.period
            made.echo(task)
            loan.tasks.collect(number, out)


@pytest.mark.parametrize(("told", "believed"), [(np.nan, 0.0), (-1.0, 0.0), (np.inf, 10.0), (0.25, 0.25)])
def test_not_everything_is_believed(told: float, believed: float) -> None:
    with lender_here() as made:
        loan = borrowed(made.lending.loan)
        begin(loan, [3])
        memory_of(made).pace[:] = told
        loan.tasks.post(0, _QKV, 1.0, 0, 0.0)
        found(made)
        receiver = made.lending.receiver
        assert (receiver.meanwhile, receiver.period) == (believed, believed)
