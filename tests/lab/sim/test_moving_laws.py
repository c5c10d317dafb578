"""Broken moves, and what is not given back: the laws' checks see it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvloom.engine.freeness import Thresholds
from kvloom.lab.faults.chaos import Verdict, run_scenario
from kvloom.lab.faults.faults import Client, FaultScenario, Relocation, SchedulerLoss, Switch
from kvloom.lab.faults.laws import NO_STARVATION, NOTHING_LEAKS, SAME_TOKENS
from kvloom.lab.faults.simulation import Parts
from kvloom.lab.sim.fleet import Rescheduling
from kvloom.types.request import SamplingParams, StartGenerate
from tests.lab.sim.breakers import DeafWire, LyingWire, PinningHost, RestlessWire, SmearingHost
from tests.lab.sim.small_units import small_units

LOST, BACK = (SchedulerLoss(0.0, 60.0),), (SchedulerLoss(0.0, 0.3),)


def scenario(
    program: str = "data_parallel", count: int = 3, leaves: float | None = None, **more: object
) -> FaultScenario:
    """Two units of one model, and so many clients with forty tokens each to come, a second or two."""
    units = small_units((160, 160), 3e-3, layers=2, context=100, lease=120.0, bandwidth=1e6)
    asked = [
        StartGenerate(
            model="m",
            request=f"ask-{i}",
            prompt=[i % 2 * 50 + at for at in range(20)],
            sampling=SamplingParams(max_tokens=40, seed=i),
            n=1 + i % 2,
        )
        for i in range(count)
    ]
    clients = tuple(Client(0.1 * i, body, leaves=leaves) for i, body in enumerate(asked))
    return FaultScenario(1, units, {"m": 100}, Switch(0.0, program, {}), clients, **more)  # type: ignore[arg-type]


def moving(**more: Any) -> FaultScenario:
    """Each of them is ordered from one unit to the other, and back."""
    return scenario(faults=tuple(Relocation(0.5 + 0.1 * i, i % 3 / 3, "unit-0") for i in range(8)), **more)


def told(verdict: Verdict, law: str) -> str:
    return "".join(f"{one.what}\n" for one in verdict.broken if one.law == law)


def test_requests_are_moved_to_and_fro() -> None:
    verdict = run_scenario(moving())
    assert not verdict.broken
    assert verdict.counts["moved by order"] >= 5


def test_requests_follow_pairs_and_go_on_without_a_scheduler() -> None:
    """From one unit to the other, which is idle then, and back."""

    def run(*losses: SchedulerLoss) -> Verdict:
        always = Rescheduling(0.1, Thresholds(1e3, 1e3, floor=0.0))
        verdict = run_scenario(scenario(count=1, rescheduling=always, faults=losses))
        assert not verdict.broken
        return verdict

    moves = [run(*losses).counts["moved by pairs"] for losses in ((), LOST, BACK)]
    assert moves[0] >= moves[2] > moves[1] == 0


@pytest.mark.parametrize(
    ("parts", "law", "says"),
    [
        (Parts(wire=LyingWire), SAME_TOKENS, "alone it is"),
        (Parts(wire=DeafWire), NO_STARVATION, "has waited for 60 s"),
        (Parts(host=SmearingHost), SAME_TOKENS, "not its own"),
    ],
)
def test_a_broken_move_is_seen(parts: Parts, law: str, says: str) -> None:
    verdict = run_scenario(moving(), parts=parts)
    assert says in told(verdict, law), verdict.broken


def test_a_request_that_did_not_stand_still_has_the_same_stream() -> None:
    """What both ends tell is told once."""
    assert not run_scenario(moving(), parts=Parts(wire=RestlessWire)).broken


@pytest.mark.parametrize(
    ("program", "parts", "what"),
    [
        ("disaggregate", Parts(wire=DeafWire), "used_blocks of m are left"),
        ("tests.lab.sim.programs:pinning", Parts(host=PinningHost), "pinned_blocks of m are left"),
    ],
)
def test_what_only_a_lease_gives_back_is_seen(program: str, parts: Parts, what: str) -> None:
    """Where all is well, nothing is left to leases."""
    leaving = scenario(program, leaves=0.05 if program == "disaggregate" else 0.5)
    assert not run_scenario(leaving).broken
    assert what in told(run_scenario(leaving, parts=parts), NOTHING_LEAKS)


def test_between_the_order_to_stand_still_and_the_start_there_is_no_other_call() -> None:
    """The last stage begins with a step, of 36 ms or more, so that there is time to make room for what the
    step makes, 20 ms, and to tell the source."""
    lines = run_scenario(moving(delay=0.01), journal=True).lines
    sent = [line.split()[3:5] for line in lines if " is sent" in line]
    after = []
    for request in {name.partition("~")[0] for _, name in sent}:
        verbs = [verb for verb, name in sent if name.partition("~")[0] == request and verb != "abort"]
        after += [then for verb, then in itertools.pairwise(verbs) if verb == "hold"]
    assert after == ["start_generate"] * len(after)
    assert len(after) >= 5
