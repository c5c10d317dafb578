"""Every law's check sees it broken."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvloom.lab.faults.chaos import run_scenario
from kvloom.lab.faults.faults import Client, FaultScenario, RollingRestart, Switch
from kvloom.lab.faults.journal import ClientAnswer
from kvloom.lab.faults.laws import (
    CONSERVATION,
    EXACTLY_ONCE,
    NO_CRASH,
    NO_STARVATION,
    NOTHING_LEAKS,
    SAME_TOKENS,
    check_answer,
)
from kvloom.lab.faults.scenario import draw_scenario
from kvloom.lab.faults.simulation import Parts
from kvloom.types.request import SamplingParams, StartGenerate, TokenEvent
from tests.lab.sim.breakers import (
    FaintingHost,
    IdleHost,
    KeepingHost,
    LosingHost,
    LyingHost,
    ShiftingLoanHost,
    ShortWire,
    StutteringWire,
    UnfencedHost,
)
from tests.lab.sim.small_units import small_units


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def is_seen(parts: Parts, law: str, says: str, seeds: range) -> bool:
    """Whether one of these runs breaks the law and says so; no run follows the first that does."""
    runs = (run_scenario(draw_scenario(seed), parts=parts) for seed in seeds)
    return any(one.law == law and says in one.what for run in runs for one in run.broken)


@pytest.mark.parametrize(
    ("parts", "law", "says"),
    [
        (Parts(host=LosingHost), CONSERVATION, "refcounts"),
        (Parts(host=LyingHost), SAME_TOKENS, "alone it is"),
        (Parts(wire=ShortWire), NO_STARVATION, "ended without an answer"),
        (Parts(wire=StutteringWire), NO_STARVATION, "token 0 came after 1"),
        (Parts(host=KeepingHost), NOTHING_LEAKS, "blocks can be had"),
        (Parts(host=IdleHost), NO_STARVATION, "has waited for 300 s"),
        (Parts(host=FaintingHost), NO_CRASH, "ZeroDivisionError at breakers.py"),
    ],
)
def test_what_breaks_a_law_is_told(parts: Parts, law: str, says: str) -> None:
    assert is_seen(parts, law, says, range(3))


def test_what_no_stream_may_do() -> None:
    """The router lets none of it pass; this is what would be said of one that did."""
    scenario = draw_scenario(0)
    answer = ClientAnswer(scenario.clients[0])
    answer.take([TokenEvent(0, 0, 5), TokenEvent(0, 0, 5)])
    answer.fate = "ended"
    said = [one.what for one in check_answer(answer, scenario) if one.law == EXACTLY_ONCE]
    assert any("token 0 follows 1" in one for one in said)
    assert any("its stream ended, but of" in one for one in said)


def crossing() -> FaultScenario:
    """A client leaves while its K and V are on their way to a small unit, whose next one gets the blocks."""
    units = small_units((100, 20), 1e-3, layers=1, context=80, lease=1.0, bandwidth=3e3)
    asked = [
        StartGenerate(
            model="m",
            request=f"ask-{i}",
            prompt=[i * 50 + at for at in range(40)],
            sampling=SamplingParams(max_tokens=40, seed=i),
        )
        for i in range(3)
    ]
    clients = (Client(0.0, asked[0], leaves=0.2), Client(0.25, asked[1]), Client(0.25, asked[2]))
    start, later = Switch(0.0, "disaggregate", {}), Switch(0.22, "data_parallel", {})
    return FaultScenario(1, units, {"m": 80}, start, clients, (later,))


def test_a_transport_without_fences_is_seen() -> None:
    assert not run_scenario(crossing()).broken
    said = run_scenario(crossing(), parts=Parts(host=UnfencedHost)).broken
    assert any(one.law == SAME_TOKENS and "not its own" in one.what for one in said)


def test_a_loan_of_which_other_blocks_are_read_than_were_written_is_seen() -> None:
    assert is_seen(Parts(host=ShiftingLoanHost), SAME_TOKENS, "reads what is not its own", range(40))


def test_a_choice_that_is_ended_while_its_unit_restarts_holds_up_nobody() -> None:
    """The request has yet to begin, and waits for the unit; meanwhile the router must do other work."""
    [unit] = small_units((100,), 1e-3, layers=1, context=80, lease=1.0, bandwidth=1e6)
    body = StartGenerate(
        model="m", request="ask", prompt=[1, 2, 3], n=2, sampling=SamplingParams(max_tokens=5, seed=1)
    )
    clients = (Client(0.1, body, aborts=0.1, choice=0),)
    restart = RollingRestart(0.05, 0.0, 1)
    units = (replace(unit, start=0.5),)
    scenario = FaultScenario(1, units, {"m": 80}, Switch(0.0, "data_parallel", {}), clients, (restart,))
    with hurried(20):
        verdict = run_scenario(scenario)
    assert not verdict.broken
    assert verdict.counts["requests ended"] == 2  # one is asked at the end, whether all is well


class StuckError(BaseException):
    """The error of what never yields; no handler of errors takes it."""


@contextmanager
def hurried(seconds: int) -> Iterator[None]:
    """Raises StuckError in what takes longer, be it stuck in a loop that never yields."""

    def ring(*_: object) -> None:
        raise StuckError(f"it takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
