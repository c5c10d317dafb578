"""Deadlines of sequences, and what jobs are expected to take."""

from __future__ import annotations

import asyncio
from math import inf

import numpy as np
import pytest

from kvloom.engine.batching.deadlines import LEEWAY, Deadlines
from kvloom.engine.batching.job_times import MEMORY, WEIGHT_READ_TOKENS, ArrivalRate, JobTimes
from kvloom.engine.sequence import Sequence, TokenBuffer
from kvloom.types.job import Phase
from kvloom.types.request import SamplingParams
from kvloom.types.spec import Slo
from tests.engine.plays import order, serve
from tests.modelled import ModelledExecutor, ask, engine_over
from tests.modelled_units import ManualClock

SLO = Slo(ttft=2.0, tpot=0.5)


def sequence(number: int = 0, *, length: int = 10, made: int = 0, most: int = 20) -> Sequence:
    tokens = TokenBuffer(np.zeros(length, np.int64), [1] * made)
    params = SamplingParams(max_tokens=most, seed=1)
    return Sequence(number, "a", f"r{number}", 0, (0, number, 0), params, tokens, [])


def drawn(deadlines: Deadlines, one: Sequence) -> None:
    deadlines.drawn(one)
    one.tokens.append(1)


def test_the_first_token_is_due_after_ttft_and_each_after_it_by_its_number() -> None:
    clock = ManualClock()
    deadlines, one = Deadlines(SLO, clock), sequence()
    clock.time = 5.0
    deadlines.came(one)
    clock.time = 6.0
    deadlines.came(one)  # again, after a preemption
    assert deadlines.due(one) == deadlines.latest(one) == 7.0
    drawn(deadlines, one)
    assert deadlines.due(one) == 6.5
    clock.time = 6.1
    drawn(deadlines, one)
    assert deadlines.due(one) == 7.0  # it is ahead
    assert deadlines.latest(one) == 7.0 + 18 * 0.5  # it could make up for so much, if steps took no time
    assert deadlines.step_due(one) == pytest.approx(7.0 + LEEWAY * 9.0)
    assert not one.missed


def test_an_objective_is_missed_by_a_late_first_token_or_a_delay_that_cannot_be_made_up_for() -> None:
    clock = ManualClock()
    deadlines, late, slow = Deadlines(SLO, clock), sequence(1), sequence(2)
    for one in (late, slow):
        deadlines.came(one)
    clock.time = 1.9
    drawn(deadlines, slow)
    clock.time = 2.1
    drawn(deadlines, late)
    assert (late.missed, deadlines.latest(late), deadlines.is_late(late, 0.0)) == (True, -inf, True)
    clock.time = 8.0  # twelve steps behind, and nineteen are to come
    drawn(deadlines, slow)
    assert not slow.missed
    clock.time = 13.0
    drawn(deadlines, slow)
    assert slow.missed


def test_a_sequence_with_tokens_from_elsewhere_begins_its_schedule_here() -> None:
    clock = ManualClock()
    deadlines, one = Deadlines(SLO, clock), sequence(made=4)
    clock.time = 10.0
    deadlines.came(one)
    assert deadlines.due(one) == 12.0


def test_jobs_take_what_the_last_ones_took() -> None:
    times = JobTimes()
    assert (times.token, times.prompt(50), times.step(3)) == (0.0, 0.0, 0.0)
    times.note(Phase.PREFILL, 100 - WEIGHT_READ_TOKENS, 1.0)
    assert times.prompt(50) == pytest.approx((50 + WEIGHT_READ_TOKENS) / 100)
    assert times.step(4) == pytest.approx((4 + WEIGHT_READ_TOKENS) / 100)  # until one was seen
    times.note(Phase.DECODE, 10, 0.5)
    assert [times.step(n) for n in (0, 10, 20)] == pytest.approx([0.0, 0.5, 0.6])
    times.note(Phase.MIXED, 300 - WEIGHT_READ_TOKENS, 1.0)
    assert times.token == pytest.approx(2 / 400)


def test_a_rate_is_of_late_and_at_first_as_planned() -> None:
    clock = ManualClock()
    rate = ArrivalRate(clock, planned=0.5)
    assert rate.a_second == pytest.approx(0.5)
    clock.time = 20 * MEMORY
    assert rate.a_second == pytest.approx(0.0, abs=1e-6)
    for i in range(4000):
        clock.time = 20 * MEMORY + i / 8
        rate.note()
    assert rate.a_second == pytest.approx(8.0, rel=0.01)
    clock.time += MEMORY
    assert rate.a_second == pytest.approx(8.0 / np.e, rel=0.01)


def test_choices_that_fork_off_have_their_requests_deadline() -> None:
    """Or they would be late from their first token on."""
    clock = ManualClock()
    clock.time = 1000.0
    executor = ModelledExecutor(400, compute=1, models=("wide",))
    engine = engine_over(executor, clock=clock, policy="slack")
    missed: list[bool] = []
    noted = Deadlines.drawn

    def watched(self: Deadlines, one: Sequence) -> None:
        noted(self, one)
        missed.append(one.missed)

    async def play() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Deadlines, "drawn", watched)
            await asyncio.gather(ask(engine, order("r", "wide", 9, n=3, max_tokens=4)))

    serve(play(), engine, executor)
    assert missed == [False] * 12
