"""Every law's check sees it broken, in drawn runs and in small ones whose every step is laid down."""

from __future__ import annotations

import itertools
import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvloom.engine.freeness import Thresholds
from kvloom.lab.faults.chaos import Verdict, run_scenario
from kvloom.lab.faults.faults import (
    VOCAB,
    Client,
    FaultScenario,
    Relocation,
    RollingRestart,
    SchedulerLoss,
    Switch,
)
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
from kvloom.lab.sim.fleet import ReschedulingSettings
from kvloom.lab.sim.linear_cost import LinearCost
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.plan.cost.shapes import ModelShape
from kvloom.types.request import SamplingParams, StartGenerate, TokenEvent
from kvloom.types.spec import EngineSpec, ModelSpec
from tests.lab.sim.breakers import (
    DeafWire,
    FaintingHost,
    IdleHost,
    KeepingHost,
    LosingHost,
    LyingHost,
    LyingWire,
    PinningHost,
    RestlessWire,
    ShiftingLoanHost,
    ShortWire,
    SmearingHost,
    StutteringWire,
    UnfencedHost,
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def small_units(
    blocks: Sequence[int], step: float, *, layers: int, context: int, lease: float, bandwidth: float
) -> tuple[SimulatedUnit, ...]:
    """Returns units of one little model `m`, with so many blocks each. step: seconds of a job, and of a
    token. lease: seconds. bandwidth: bytes/s between them."""
    shape = ModelShape(layers=layers, hidden=16, heads=2, kv_heads=1, head_dim=8, ffn=16, vocab=VOCAB)
    return tuple(
        SimulatedUnit(
            EngineSpec(
                models=(ModelSpec(name="m", path="", max_context=context),),
                kv_bytes=count * 128,
                block_bytes=128,
                policy="fcfs",
                max_running=4,
                max_waiting=8,
                chunk_tokens=64,
                threads=1,
                unit=f"unit-{i}",
                lease=lease,
            ),
            {"m": shape},
            1,
            LinearCost(step),
            bandwidth=bandwidth,
            max_steps=1,
        )
        for i, count in enumerate(blocks)
    )


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
        always = ReschedulingSettings(0.1, Thresholds(1e3, 1e3, floor=0.0))
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
        ("tests.lab.sim.breakers:pinning", Parts(host=PinningHost), "pinned_blocks of m are left"),
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
