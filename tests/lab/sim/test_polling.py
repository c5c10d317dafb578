"""Tasks that meet the operators of a lender's job one by one."""

from __future__ import annotations

import numpy as np
import pytest

from kvloom.lab.sim.executor import Progress
from kvloom.lab.sim.polling import Pieces, WaitTally, seconds_behind_launches
from kvloom.offload.queueing import Cut, Exchange, cut_up, expected_stall, parts_of
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.cost.work import Work

WORK = Work.decode("llama3-8b", 1.0, [500] * 8)
A100 = Roofline(find_device("A100-40"), 1, {WORK.model: find_shape(WORK.model)})


def at(part: float, seconds: float = 10.0, still: float = 0.0, age: float = 0.0) -> Progress:
    return Progress(WORK, seconds, part, still, age)


def test_a_task_waits_for_the_piece_that_runs_and_the_look_after_it() -> None:
    pieces = Pieces(Cut((3.0, 1.0, 4.0), 0.0), poll=0.5)  # looks at 3.5, 5 and 9.5
    assert pieces.seconds_to_poll(at(0.0, 9.5)) == pytest.approx(3.5)
    assert pieces.seconds_to_poll(at(4.0 / 9.5, 9.5)) == pytest.approx(1.0)
    assert pieces.seconds_to_poll(at(1.0, 9.5)) == 0.0
    assert pieces.seconds_to_poll(at(4.0 / 9.5, 19.0)) == pytest.approx(2.0)  # a job that takes twice as long
    assert pieces.seconds_to_poll(at(0.0, 9.5, still=2.0)) == pytest.approx(5.5)
    assert Pieces(Cut((), 0.0), 0.5).seconds_to_poll(at(0.5)) is None


def test_a_host_that_is_ahead_of_its_device_keeps_a_task_waiting() -> None:
    assert seconds_behind_launches(10.0, at(0.3)) == pytest.approx(7.0)  # all is issued at once
    assert seconds_behind_launches(0.0, at(0.3, age=3.0)) == pytest.approx(
        0.0
    )  # the device waits for the host
    assert seconds_behind_launches(5.0, at(0.2, age=2.0)) == pytest.approx(2.0)  # 2 s issue what takes 4
    assert seconds_behind_launches(5.0, at(0.6, age=6.0)) == pytest.approx(4.0)
    assert seconds_behind_launches(5.0, at(0.2, age=4.0)) == pytest.approx(6.0)  # it has stood still for 2 s


@pytest.mark.parametrize("split", [False, True])
def test_tasks_at_any_moment_wait_as_the_formula_says(split: bool) -> None:
    """The simulation knows nothing of the formula: it looks up which piece runs."""
    operators = A100.operators(WORK)
    parts = parts_of(operators, 30e-6, 20e-6) if split else ()
    pieces = Pieces(cut_up(operators, parts, A100), A100.poll)
    exchange = Exchange(own=80e-6, service=30e-6, wire=10e-6)
    tally, seconds = WaitTally(), sum(pieces.times)
    for part in np.random.default_rng(0).random(40_000):
        wait = pieces.seconds_to_poll(at(float(part), seconds))
        assert wait is not None
        tally.add(wait, exchange)
    tally.expect(exchange, pieces.times)
    found = tally.waits()
    assert found.wait == pytest.approx(found.expected_wait, rel=0.03)
    assert found.beyond == pytest.approx(found.expected_beyond, rel=0.03)
    assert found.stall == pytest.approx(found.expected_stall, rel=0.05)
    assert found.expected_stall == expected_stall(pieces.times, exchange.ahead)
