"""A mailbox between two threads and between two processes: every task once, with what was written before
it."""

from __future__ import annotations

import gc
import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvloom.kernels.mailbox import End
from kvloom.offload.memory.borrower import BorrowedBlocks
from kvloom.offload.memory.lender import Lending, Task
from kvloom.types.errors import BadRequest, QueueFull, Unavailable
from tests.processes import DEADLINE
from tests.transfer.loans import (
    GEOMETRY,
    HEADS,
    LENT,
    ROWS,
    WIDTH,
    Lender,
    asked,
    begin,
    borrowed,
    lender_elsewhere,
    lender_here,
    memory_of,
)

_WRAPS = (1 << 32) - 5  # the counters pass 0 after a few tasks
_TOTAL = HEADS + 2 * GEOMETRY.kv_heads
_ONES = np.ones((1, _TOTAL, GEOMETRY.head_dim), np.float32)


def _ask(loan: BorrowedBlocks, rows: int, layer: int, value: float) -> None:
    """One task, whose answer is the echo's."""
    task = loan.tasks.post(layer, np.full((rows, _TOTAL, GEOMETRY.head_dim), value, np.float32), 1.0, 0, 0.0)
    out = np.empty((rows, HEADS, GEOMETRY.head_dim), np.float32)
    loan.tasks.collect(task, out)
    assert (out == value * (layer + 1)).all()


def _echo_all(made: Lender, count: int, naps: frozenset[int]) -> None:
    """At the tasks in `naps` the lender is asleep."""
    done = 0
    while done < count:
        if done in naps:
            made.rest(0.5)
        task = made.lending.receiver.next()
        if task is not None:
            made.echo(task)
            done += 1


@settings(max_examples=25)
@given(
    iterations=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    slots=st.sampled_from([1, 2, 4]),
    start=st.sampled_from([0, _WRAPS, (1 << 31) - 2]),
    naps=st.frozensets(st.integers(0, 9)),
)
def test_two_threads(iterations: list[int], slots: int, start: int, naps: frozenset[int]) -> None:
    with lender_here(start, slots) as made:
        loan = borrowed(made.lending.loan)
        count = len(iterations) * GEOMETRY.layers
        thread = threading.Thread(target=_echo_all, args=(made, count, naps))
        thread.start()
        for i, rows in enumerate(iterations):
            begin(loan, [i + 1] * rows)
            for layer in range(GEOMETRY.layers):
                _ask(loan, rows, layer, i + layer / 2)
        thread.join(DEADLINE)
        assert not thread.is_alive()
        assert made.lending.receiver.next() is None


def test_two_processes_through_the_wrap() -> None:
    with lender_elsewhere(start=_WRAPS) as (terms, _):
        loan = borrowed(terms)
        for i in range(300):
            begin(loan, [1 + i % 16, 16])
            for layer in range(GEOMETRY.layers):
                _ask(loan, 2, layer, float(i))
        loan.tasks.close()


def test_a_borrower_that_has_left_gets_nothing_done_on_the_loan_that_it_left() -> None:
    """Else one that is given it again, and counts iterations anew, would have an old descriptor's rows."""
    with lender_here() as made:
        loan = borrowed(made.lending.loan)
        begin(loan, [3])
        thread = threading.Thread(target=_echo_all, args=(made, 1, frozenset()))
        thread.start()
        _ask(loan, 1, 0, 1.0)
        thread.join(DEADLINE)
        loan.tasks.close()
        again = borrowed(made.lending.loan)
        begin(again, [16], version=2)
        again.tasks.post(0, _ONES, 1.0, 0, 0.0)
        assert made.lending.receiver.next() is None


def test_a_lender_whose_ledger_is_full_keeps_no_mailbox() -> None:
    with lender_here() as made:
        for _ in range(7):  # of eight; the lender has one
            made.transport.open(0, 1)
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(QueueFull, match="reservations are open"):
            Lending(asked(os.getpid()), LENT, made.transport)
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("change", [{"rows": ROWS + 1}, {"width": WIDTH - 1}, {"heads": HEADS * 2}])
def test_a_mailbox_for_another_model_is_refused_and_given_back(change: dict[str, int]) -> None:
    with lender_here() as made:
        with pytest.raises(BadRequest, match="the mailbox of lender is for another model"):
            BorrowedBlocks(replace(asked(os.getpid()), **change), made.lending.loan, 1.0)
        assert made.lending.receiver.left


def test_several_tasks_at_a_time_and_no_more_than_there_are_slots() -> None:
    with lender_here(_WRAPS, slots=4) as made:
        loan = borrowed(made.lending.loan)
        begin(loan, [1])
        tasks = [loan.tasks.post(i % 2, _ONES * i, 1.0, 0, 0.0) for i in range(4)]
        with pytest.raises(QueueFull, match="4 tasks wait at lender"):
            loan.tasks.post(0, _ONES, 1.0, 0, 0.0)
        _echo_all(made, 4, frozenset())
        out = np.empty((1, HEADS, GEOMETRY.head_dim), np.float32)
        for i in (2, 0, 3, 1):  # in any order
            loan.tasks.collect(tasks[i], out)
            assert (out == i * (i % 2 + 1)).all()


def test_a_lender_that_never_answers_is_waited_for_so_long_and_no_longer() -> None:
    with lender_here() as made:
        loan = borrowed(made.lending.loan, patience=0.05)
        begin(loan, [1])
        with pytest.raises(Unavailable, match=r"lender has not attended within 0.05 s"):
            _ask(loan, 1, 0, 1.0)


def test_a_lender_that_is_killed_while_it_is_waited_for() -> None:
    with lender_elsewhere(answers=3) as (terms, process):
        loan = borrowed(terms)
        begin(loan, [1])
        for layer in (0, 1, 0):
            _ask(loan, 1, layer, 2.0)
        threading.Timer(0.1, process.kill).start()
        with pytest.raises(Unavailable, match="lender is gone"):
            _ask(loan, 1, 1, 2.0)


@pytest.mark.parametrize(
    ("why", "words"), [(End.CLOSED, "wants its blocks back"), (End.FORGED, "refuses"), (End.FAILED, "failed")]
)
def test_a_lender_that_ends_says_why(why: End, words: str) -> None:
    with lender_here() as made:
        loan = borrowed(made.lending.loan)
        begin(loan, [1])
        threading.Timer(0.05, made.lending.receiver.end, [why]).start()
        with pytest.raises(Unavailable, match=words):
            _ask(loan, 1, 0, 1.0)
        with pytest.raises(Unavailable, match=words):
            _ask(loan, 1, 0, 1.0)


def test_a_lender_that_counts_wrongly_is_not_believed() -> None:
    with lender_here() as made:
        loan = borrowed(made.lending.loan)
        begin(loan, [1])
        made.lending.mailbox.memory.done.set(77)
        with pytest.raises((Unavailable, QueueFull)):
            _ask(loan, 1, 0, 1.0)


def test_more_rows_than_the_mailbox_takes_are_refused_at_once() -> None:
    with lender_here() as made:
        loan = borrowed(made.lending.loan)
        with pytest.raises(BadRequest, match="4 rows of 2 pages; want 3 of 4"):
            begin(loan, [1] * 4)


# -- what the ends tell each other of time -----------------------------------------------------------


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
            number = loan.tasks.post(0, _ONES, 1.0, 0, 0.0)
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
        loan.tasks.post(0, _ONES, 1.0, 0, 0.0)
        found(made)
        receiver = made.lending.receiver
        assert (receiver.meanwhile, receiver.period) == (believed, believed)
