"""What is due, by what the fleet is to be and what there is of it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvloom.cluster.actions import (
    Action,
    BeginServing,
    DrainUnit,
    EndTurn,
    Forget,
    Kill,
    PassOver,
    ProveProgram,
    RaiseGeneration,
    ReadmitUnit,
    RetireGateway,
    RevertProgram,
    StartProcess,
    StopProcess,
    Wait,
)
from kvloom.cluster.launcher import Ended
from kvloom.cluster.lifecycle import heard
from kvloom.cluster.reconcile import Timing, reconcile
from kvloom.cluster.state import (
    NEXT,
    ComponentStatus,
    FleetSpec,
    FleetStatus,
    Outlook,
    Phase,
    Rolling,
    UnitSpec,
    is_counted,
    outlook,
)
from kvloom.types.spec import ProgramSpec
from tests.cluster.histories import engine

NOW = 50.0
SERVING = ComponentStatus(phase="ready", generation=1, begun=True)


def unit(**changes: Any) -> UnitSpec:
    return UnitSpec(engine=engine("a"), **changes)


def due(units: dict[str, UnitSpec], processes: dict[str, ComponentStatus], **spec: Any) -> tuple[Action, ...]:
    """For a fleet whose gateway serves, if nothing else is said of it."""
    processes = {"gateway/1": SERVING} | processes
    status = FleetStatus(processes=processes, opened=True)
    return reconcile(FleetSpec(units=units, **spec), status, NOW)


def at(phase: Phase, generation: int = 1, **changes: Any) -> ComponentStatus:
    return ComponentStatus(phase=phase, generation=generation, **changes)


@pytest.mark.parametrize(
    ("spec", "process", "actions"),
    [
        (unit(), ComponentStatus(), [StartProcess("a", 1)]),
        (unit(wanted=False), ComponentStatus(), []),
        (unit(wanted=False, removed=True), ComponentStatus(), [Forget("a")]),
        (unit(), at("starting", since=NOW), [Wait(NOW + 1800)]),
        (unit(), at("starting", since=NOW - 1800), [Kill("a")]),
        (unit(), at("starting", since=NOW - 1801, killed=True), []),
        (unit(), at("ready"), []),
        (unit(drained=True), at("ready", calls=0), []),
        (unit(), at("ready", misses=2), []),
        (unit(), at("ready", misses=3), [Kill("a")]),
        (unit(), at("ready", misses=4, killed=True), []),
        (unit(wanted=False, seconds=5.0), at("ready"), [DrainUnit("a", NOW + 5)]),
        (unit(generation=2), at("ready"), [DrainUnit("a", None)]),
        (unit(wanted=False), at("draining"), []),
        (unit(wanted=False), at("draining", calls=2, until=60.0), [Wait(60.0)]),
        (unit(wanted=False), at("draining", calls=2, until=NOW), [StopProcess("a")]),
        (unit(wanted=False), at("draining", calls=0, until=60.0), [StopProcess("a")]),
        (unit(), at("draining", calls=2), [ReadmitUnit("a")]),
        (unit(generation=2), at("starting"), [StopProcess("a")]),
        (unit(wanted=False), at("starting"), [StopProcess("a")]),
        (unit(generation=2), at("ending", until=60.0), [Wait(60.0)]),
        (unit(generation=2), at("ending", until=NOW), [Kill("a")]),
        (unit(generation=2), at("ending", until=NOW, killed=True), []),
        (unit(), at("waiting", until=51.0), [Wait(51.0)]),
        (unit(), at("waiting", until=NOW), [StartProcess("a", 1)]),
        (unit(generation=2), at("waiting", until=99.0), [StartProcess("a", 2)]),
        (unit(wanted=False), at("waiting", until=99.0), [Forget("a")]),
        (unit(), at("failed", until=51.0), []),
        (unit(generation=2), at("failed"), [StartProcess("a", 2)]),
        (unit(wanted=False), at("failed"), [Forget("a")]),
        (None, at("ready"), [DrainUnit("a", None)]),
        (None, at("absent"), [Forget("a")]),
    ],
)
def test_a_unit(spec: UnitSpec | None, process: ComponentStatus, actions: list[Action]) -> None:
    assert due({"a": spec} if spec else {}, {"a": process}) == tuple(actions)


@pytest.mark.parametrize(
    ("generation", "gateways", "actions"),
    [
        (1, {}, [StartProcess("gateway/1", 1)]),
        (1, {1: at("starting")}, [BeginServing("gateway/1")]),
        (1, {1: at("starting", begun=True)}, []),
        (1, {1: at("waiting", until=60.0)}, [Wait(60.0)]),
        (1, {1: at("ready", misses=3)}, [Kill("gateway/1")]),
        (1, {1: at("starting", begun=True, proven=1, since=NOW)}, [Wait(NOW + 60)]),
        (1, {1: at("starting", begun=True, proven=1, since=NOW - 60)}, [Kill("gateway/1")]),
        (2, {1: SERVING}, [StartProcess("gateway/2", 2)]),
        (2, {1: SERVING, 2: at("starting", 2, begun=True, since=NOW)}, [Wait(NOW + 60)]),
        (2, {1: SERVING, 2: at("starting", 2, begun=True, since=NOW - 60)}, [Kill("gateway/2")]),
        (2, {1: SERVING, 2: at("ready", 2)}, [RetireGateway("gateway/1", NOW + 65)]),
        (2, {1: at("retiring", until=60.0), 2: at("ready", 2)}, [Wait(60.0)]),
        (2, {1: at("retiring", until=NOW), 2: at("ready", 2)}, [Kill("gateway/1")]),
        (2, {1: at("absent"), 2: at("ready", 2)}, [Forget("gateway/1")]),
        (2, {1: SERVING, 2: at("failed", 2)}, []),
        (2, {1: at("waiting", until=NOW), 2: at("failed", 2)}, [StartProcess("gateway/1", 1)]),
        (2, {1: at("waiting", until=NOW), 2: at("starting", 2, begun=True)}, [Forget("gateway/1")]),
        (2, {2: at("failed", 2, until=60.0)}, [Wait(60.0)]),
        (2, {2: at("failed", 2, until=NOW)}, [StartProcess("gateway/2", 2)]),
        (
            3,
            {1: SERVING, 2: at("starting", 2), 3: at("ready", 3)},
            [RetireGateway("gateway/1", NOW + 65), StopProcess("gateway/2")],
        ),
    ],
)
def test_the_gateway(generation: int, gateways: dict[int, ComponentStatus], actions: list[Action]) -> None:
    processes = {f"gateway/{number}": one for number, one in gateways.items()}
    status = FleetStatus(processes=processes, opened=True)
    assert reconcile(FleetSpec(gateway=generation), status, NOW) == tuple(actions)


@pytest.mark.parametrize(
    ("phase", "begins"), [("absent", False), ("starting", False), ("ready", True), ("failed", True)]
)
def test_the_first_gateway_serves_once_no_unit_is_about_to_come(phase: Phase, begins: bool) -> None:
    status = FleetStatus(processes={"a": at(phase), "gateway/1": at("starting")})
    actions = reconcile(FleetSpec(units={"a": unit(), "b": unit(wanted=False)}), status, NOW)
    assert (BeginServing("gateway/1") in actions) == begins


@pytest.mark.parametrize(
    ("generation", "process", "actions"),
    [
        (0, ComponentStatus(), []),
        (1, ComponentStatus(), [StartProcess("scheduler", 1)]),
        (2, at("ready"), [StopProcess("scheduler")]),
        (1, at("waiting", until=NOW), [StartProcess("scheduler", 1)]),
        (0, at("ready"), [StopProcess("scheduler")]),
        (1, at("ready", misses=2), []),
        (1, at("ready", misses=3), [Kill("scheduler")]),
        (1, at("starting", since=NOW), [Wait(NOW + 60)]),
        (1, at("starting", since=NOW - 60), [Kill("scheduler")]),
        (1, at("starting", since=NOW - 60, killed=True), []),
        (2, at("starting", since=NOW - 60), [StopProcess("scheduler")]),
    ],
)
def test_the_scheduler(generation: int, process: ComponentStatus, actions: list[Action]) -> None:
    there = {} if process == ComponentStatus() else {"scheduler": process}
    assert due({}, there, scheduler=generation) == tuple(actions)


OVER = NOW - 70  # A minute before, and the time of a look.
DIED = "ended with exit code 1"


@pytest.mark.parametrize(
    ("began", "gateways", "actions"),
    [
        (NOW, {1: SERVING}, [Wait(NOW + 70)]),
        (OVER + 1, {1: SERVING}, [Wait(NOW + 1)]),
        (OVER, {1: SERVING}, [ProveProgram()]),
        (OVER, {1: replace(SERVING, misses=1)}, []),
        (OVER, {1: replace(SERVING, misses=3, killed=True)}, []),
        (OVER, {1: replace(SERVING, misses=3)}, [Kill("gateway/1")]),
        (40.0, {1: at("waiting", since=40.0, problem=DIED, until=60.0)}, [RevertProgram(DIED), Wait(60.0)]),
        (OVER, {1: at("waiting", since=49.0, problem=DIED, until=60.0)}, [RevertProgram(DIED), Wait(60.0)]),
        (40.0, {1: at("waiting", since=39.0, problem=DIED, until=60.0)}, [Wait(60.0)]),
        (40.0, {1: SERVING, 2: at("failed", 2, since=41.0, problem=DIED)}, [RevertProgram(DIED)]),
        (None, {1: at("waiting", since=49.0, problem=DIED, until=60.0)}, [Wait(60.0)]),
    ],
)
def test_a_program_on_probation(
    began: float | None, gateways: dict[int, ComponentStatus], actions: list[Action]
) -> None:
    processes = {f"gateway/{number}": one for number, one in gateways.items()}
    status = FleetStatus(processes=processes, opened=True, probation=began)
    wild = None if began is None else ProgramSpec("wild")
    assert reconcile(FleetSpec(program=wild, gateway=max(gateways)), status, NOW) == tuple(actions)


ALL = ("a", "b", "scheduler", "gateway")


@pytest.mark.parametrize(
    ("rolling", "a", "b", "actions"),
    [
        (Rolling(left=ALL), at("ready"), at("ready"), [RaiseGeneration("a")]),
        (Rolling(left=ALL, budget=2), at("ready"), at("ready"), [RaiseGeneration("a"), RaiseGeneration("b")]),
        (Rolling(left=ALL), at("waiting", until=60.0), at("ready"), [Wait(60.0), RaiseGeneration("a")]),
        (Rolling(left=ALL), at("draining", 0, calls=1), at("ready"), []),
        (Rolling(left=ALL[1:], active=("a",)), at("ready"), at("ready"), []),
        (
            Rolling(left=ALL[1:], active=("a",)),
            at("ready", seen=True),
            at("ready"),
            [EndTurn("a"), RaiseGeneration("b")],
        ),
        (
            Rolling(left=ALL[1:], active=("a",)),
            at("ready", seen=True, problem="it differs"),
            at("ready"),
            [EndTurn("a", "it differs")],
        ),
        (
            Rolling(left=ALL[1:], active=("a",)),
            at("failed", problem="it died"),
            at("ready"),
            [EndTurn("a", "it died")],
        ),
        (Rolling(left=("scheduler", "gateway")), at("ready"), at("ready"), [RaiseGeneration("scheduler")]),
        (Rolling(left=("gateway",)), at("draining", 0, calls=1), at("ready"), []),
        (
            Rolling(left=("gateway",), active=("scheduler",)),
            at("ready"),
            at("ready"),
            [EndTurn("scheduler"), RaiseGeneration("gateway")],
        ),
        (Rolling(left=(), active=("gateway",)), at("ready"), at("ready"), [EndTurn("gateway")]),
        (
            Rolling(left=("z", "gateway")),
            at("ready"),
            at("ready"),
            [PassOver("z"), RaiseGeneration("gateway")],
        ),
    ],
)
def test_a_rolling_restart(
    rolling: Rolling, a: ComponentStatus, b: ComponentStatus, actions: list[Action]
) -> None:
    units = {"a": unit(), "b": unit()}
    found = due(units, {"a": a, "b": b, "scheduler": at("ready")}, scheduler=1, rolling=rolling)
    waits = [action for action in found if isinstance(action, Wait)]
    assert sorted(map(repr, found)) == sorted(map(repr, actions))
    assert not waits or found[-1] == waits[0]


def test_a_rolling_restart_leaves_a_unit_alone_that_is_to_have_no_process() -> None:
    rolling = Rolling(left=("a", "b", "gateway"))
    units = {"a": unit(wanted=False), "b": unit(wanted=False)}
    assert due(units, {"a": at("draining", calls=1)}, rolling=rolling) == (
        PassOver("a"),
        PassOver("b"),
        RaiseGeneration("gateway"),
    )


@pytest.mark.parametrize(
    ("spec", "process", "said"),
    [
        (unit(), at("ready"), "here"),
        (unit(), ComponentStatus(), "starting"),
        (unit(), at("starting"), "starting"),
        (unit(), at("starting", failures=1), "down"),
        (unit(), at("waiting"), "down"),
        (unit(), at("failed"), "failed"),
        (unit(generation=2), at("ready"), "restarting"),
        (unit(generation=2), at("draining"), "restarting"),
        (unit(generation=2), at("ending"), "restarting"),
        (unit(), at("absent", replaces=True), "restarting"),
        (unit(), at("starting", replaces=True), "restarting"),
        (unit(wanted=False), at("draining"), "leaving"),
        (unit(wanted=False), at("ending"), "leaving"),
        (unit(wanted=False), ComponentStatus(), "away"),
        (None, at("ready"), "leaving"),
        (None, at("absent"), "away"),
    ],
)
def test_how_a_unit_stands(spec: UnitSpec | None, process: ComponentStatus, said: Outlook) -> None:
    assert outlook(spec, process) == said


def test_whose_requests_are_counted() -> None:
    assert is_counted(unit(drained=True), at("ready"))
    assert is_counted(unit(), at("draining"))
    assert not is_counted(unit(), at("ready"))


def test_a_thousand_units_that_are_as_they_are_to_be_ask_for_nothing() -> None:
    units = {f"u{i}": unit() for i in range(1000)}
    assert due(units, dict.fromkeys(units, at("ready"))) == ()
    changed = units | {"u7": replace(units["u7"], generation=2)}
    assert due(changed, dict.fromkeys(units, at("ready"))) == (DrainUnit("u7", None),)


def test_every_phase_can_be_left_and_none_leads_nowhere() -> None:
    assert {phase for following in NEXT.values() for phase in following} == NEXT.keys()


def test_pauses_double_until_a_life_was_healthy() -> None:
    timing, pause, pauses = Timing(), 0.0, []
    for lived in (0.0, 5.0, 59.0, 0.0, 0.0, 0.0, 0.0, 0.0, 60.0, 0.0):
        pause = timing.pause(pause, lived)
        pauses.append(pause)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 0.5, 1]


@pytest.mark.parametrize(("proven", "phase"), [(0, "failed"), (1, "waiting")])
def test_a_unit_that_loads_for_too_long_says_so(proven: int, phase: Phase) -> None:
    process = at("starting", killed=True, proven=proven, since=NOW - 7)
    ended = heard(Ended("a", "died of SIGKILL"), process, FleetSpec(units={"a": unit()}), NOW, Timing(load=7))
    assert (ended.phase, ended.problem) == (
        phase,
        "did not load its models in 7 s (`load_timeout`) and was killed",
    )
