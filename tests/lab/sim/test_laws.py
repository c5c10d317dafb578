"""Every law's check sees it broken."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvloom.lab.faults.chaos import run_scenario
from kvloom.lab.faults.faults import Client, FaultScenario, Switch
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


def broken(parts: Parts, seeds: range) -> dict[str, str]:
    """By law, what these runs said."""
    said: dict[str, str] = {}
    for seed in seeds:
        for one in run_scenario(draw_scenario(seed), parts=parts).broken:
            said[one.law] = f"{said.get(one.law, '')}{one.what}\n"
    return said


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
    assert says in broken(parts, range(3))[law]


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
    said = broken(Parts(host=ShiftingLoanHost), range(40))
    assert "reads what is not its own" in said[SAME_TOKENS]
