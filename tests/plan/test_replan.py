"""`kvloom replan` against a fleet that does as it is told: what it shows, does, and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvloom.cli.app import CommandFailed
from kvloom.cli.gateway import AdminClient, GatewayError
from kvloom.cli.plan.replan import plan_by_traffic, replan
from kvloom.journal.traffic import HOUR, TrafficHour
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.plan import (
    PROCESS_BYTES,
    PlacementPlan,
    PlannedModel,
    PlannedUnit,
    host_bytes,
    write_plan,
)
from kvloom.plan.target import new_names
from kvloom.types.errors import ConfigError
from kvloom.types.service import Admit, Drain, Placement, Service, UnitState
from kvloom.types.spec import EngineSpec, ModelSpec, WeaveSpec
from tests.plan.cost.profiles import make_profile

GIB = 1 << 30
SHAPE = find_shape("llama-7b")
ALONE = GIB + host_bytes(SHAPE) + PROCESS_BYTES  # bytes that a unit of one model takes


def spec(name: str, *models: str, kv_bytes: int = GIB, **more: Any) -> EngineSpec:
    shares: dict[str, Any] = {"prefill_share": 1.0, "decode_share": 0.52, "quota": 0.5}
    return EngineSpec(
        unit=name,
        models=tuple(ModelSpec(name=model, path=f"/{model}", max_context=99, **shares) for model in models),
        kv_bytes=kv_bytes,
        block_bytes=4096,
        policy="fcfs",
        max_running=7,
        max_waiting=8,
        chunk_tokens=9,
        threads=1,
        **more,
    )


def planned(*units: str, kv_bytes: int = GIB, gpus: int = 1, **more: str) -> PlacementPlan:
    """A unit each, with the models that its letters name."""

    def model(name: str) -> PlannedModel:
        return PlannedModel(
            name=name,
            path=None,
            shape=SHAPE,
            rate=0.0,
            prompt=9,
            output=9,
            prefill_share=1.0,
            decode_share=0.5,
            quota=0.5,
            throughput=1,
        )

    where: dict[str, Any] = {"node": "here", "device": "cpu"} | more
    return PlacementPlan(
        units=tuple(
            PlannedUnit(
                name=f"u{at}",
                gpus=gpus,
                index=0 if where["device"] == "cpu" else at,
                kv_bytes=kv_bytes,
                models=tuple(map(model, names)),
                **where,
            )
            for at, names in enumerate(units)
        ),
        throughput=1.0,
        made_by="a test",
    )


HOURS = 490_000 * HOUR  # when the traffic began


class Played(AdminClient):
    """A fleet with that many bytes of memory. At the order number `fails` it can no longer be reached."""

    def __init__(self, *units: EngineSpec, memory: int = 3 * ALONE, fails: int = -1, **more: Any) -> None:
        super().__init__("http://played", None)
        fields: dict[str, Any] = {"away": (), "scaled": (), "cores": 2} | more
        self.fleet = Placement(units=units, memory=memory, **fields)
        self.orders: list[str] = []
        self.states: dict[str, Service] = {}  # of those that are not up
        self.fails = fails
        self.asked: list[TrafficHour] = []

    def traffic(self) -> list[TrafficHour]:
        return self.asked

    def placement(self) -> Placement:
        return self.fleet

    def units(self) -> list[UnitState]:
        return [
            UnitState(name=one.unit, state=self.states.get(one.unit, "up"), calls=0, models=())
            for one in self.fleet.units
        ]

    def order(self, unit: str, what: str, body: Drain | Admit) -> UnitState:
        units, away = self.fleet.units, self.fleet.away
        if what == "remove":
            assert unit in {one.unit for one in away}
            return self._done(f"remove {unit}", units, tuple(one for one in away if one.unit != unit))
        (found,) = (one for one in units if one.unit == unit)
        if what == "stop":
            left = tuple(one for one in units if one is not found)
            return self._done(f"stop {unit}", left, (*away, found))
        if self.states.get(unit) == "starting":
            del self.states[unit]
        self._done(f"start {unit}", units, away)
        return next(one for one in self.units() if one.name == unit)

    def _done(self, order: str, units: tuple[EngineSpec, ...], away: tuple[EngineSpec, ...]) -> UnitState:
        if len(self.orders) == self.fails:
            raise GatewayError("http://played: cannot be reached")
        self.orders.append(order)
        self.fleet = replace(self.fleet, units=units, away=away)
        return UnitState(name="", state="up", calls=0, models=())

    def add(self, spec: EngineSpec) -> UnitState:
        return self._done(f"add {spec.unit}", (*self.fleet.units, spec), self.fleet.away)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def test_what_is_to_be_done_is_shown_and_done(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Played(spec("unit-0", "a"), spec("unit-1", "b"), spec("unit-2", "c"), memory=5 * ALONE)
    write_plan(file, planned("c", "ab"))
    replan(file, fleet, apply=False)
    assert capsys.readouterr().out.splitlines() == [
        "keep   unit-2: c (1 GiB of K and V, 1 core)",
        "start  unit-3: a, b (1 GiB of K and V, 1 core)",
        "stop   unit-1",
        "stop   unit-0",
        "forget unit-1",
        "forget unit-0",
        "nothing is changed yet; --apply does it",
    ]
    assert not fleet.orders
    replan(file, fleet, apply=True)
    assert capsys.readouterr().out.splitlines()[6:] == [
        "1/5 starting unit-3 …",
        "2/5 stopping unit-1 …",
        "3/5 stopping unit-0 …",
        "4/5 forgetting unit-1 …",
        "5/5 forgetting unit-0 …",
        "the fleet is as planned",
    ]
    assert not fleet.fleet.away
    kept, new = fleet.fleet.units
    assert (kept.unit, new.unit, new.policy, new.block_bytes) == ("unit-2", "unit-3", "fcfs", 4096)
    assert [(one.name, one.path, one.max_context) for one in new.models] == [("a", "/a", 99), ("b", "/b", 99)]
    replan(file, fleet, apply=True)
    assert capsys.readouterr().out.splitlines()[-1] == "the fleet is as planned"
    assert len(fleet.orders) == 5


def test_nobody_stops_before_those_that_stay_are_up(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As after an interruption while the new unit starts."""
    fleet = Played(spec("unit-0", "a", "b"), spec("unit-1", "a"), spec("unit-2", "b"), memory=5 * ALONE)
    fleet.states = {"unit-0": "starting"}
    write_plan(file, planned("ab"))
    replan(file, fleet, apply=True)
    assert fleet.orders == ["start unit-0", "stop unit-2", "stop unit-1", "remove unit-2", "remove unit-1"]
    assert "1/5 waiting for unit-0 …" in capsys.readouterr().out.splitlines()


def test_what_stays_and_is_out_of_service_keeps_the_others(file: Path) -> None:
    fleet = Played(spec("unit-0", "a", "b"), spec("unit-1", "a"), memory=5 * ALONE)
    fleet.states = {"unit-0": "drained"}
    write_plan(file, planned("ab"))
    with pytest.raises(
        CommandFailed, match=r"^unit-0, which is to stay, is drained; it has to be up"
    ) as failed:
        replan(file, fleet, apply=True)
    assert failed.value.code == 1
    assert fleet.orders == ["start unit-0"]


def test_what_a_plan_does_not_say_is_taken_over_from_who_has_most_of_the_models(file: Path) -> None:
    first, second = spec("unit-0", "a"), spec("unit-1", "b", "c", lease=9.0)
    fleet = Played(first, replace(second, policy="round-robin"), memory=5 * ALONE)
    write_plan(file, planned("bca", "a"))
    replan(file, fleet, apply=True)
    found = {len(one.models): (one.policy, one.lease) for one in fleet.fleet.units}
    assert found == {3: ("round-robin", 9.0), 1: ("fcfs", first.lease)}


def test_who_waits_is_said(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Played(spec("unit-0", "a"), spec("unit-1", "b"), memory=2 * ALONE)
    write_plan(file, planned("ab"))
    replan(file, fleet, apply=True)
    assert "requests for b wait meanwhile" in capsys.readouterr().out
    assert [one.unit for one in fleet.fleet.units] == ["unit-2"]


@pytest.mark.parametrize("fails", range(5))
def test_another_time_goes_on_from_where_the_first_ended(file: Path, fails: int) -> None:
    fleet = Played(spec("unit-0", "a"), spec("unit-1", "b"), memory=2 * ALONE, fails=fails)
    write_plan(file, planned("ab"))
    with pytest.raises(CommandFailed, match="cannot be reached; `kvloom replan` again") as failed:
        replan(file, fleet, apply=True)
    assert failed.value.code == 1
    fleet.fails = -1
    replan(file, fleet, apply=True)
    assert not fleet.fleet.away
    assert [[model.name for model in one.models] for one in fleet.fleet.units] == [["a", "b"]]


UP = (spec("unit-0", "a"), spec("unit-1", "b"))
BOTH = planned("ab")
[UNIT] = BOTH.units
ELSEWHERE = replace(UNIT.models[0], path="/other")


@pytest.mark.parametrize(
    ("plan", "units", "fleet", "message"),
    [
        (planned("a"), UP, {}, "no unit for b, which is served"),
        (planned("abc"), UP, {}, "u0: 'c' is not served; of the fleet are a, b"),
        (planned("a", "b", device="A10"), UP, {}, "units on A10; plan and fleet on device cpu are right"),
        (BOTH, (spec("unit-0", "a", "b", device="cuda:0"),), {}, "units on cuda:0"),
        (planned("ab", gpus=3), UP, {}, "a plan for 3 cores; the fleet has 2"),
        (replace(BOTH, units=(UNIT, replace(UNIT, name="u1", node="there"))), UP, {}, "units on 2 nodes"),
        (BOTH, UP, {"memory": ALONE}, "and there are"),
        (BOTH, UP, {"scaled": ("unit-1",)}, "unit-1 come and go by themselves"),
        (
            BOTH,
            (spec("unit-0", "a", weave=WeaveSpec("unit-1", 0.5, 0.3)), UP[1]),
            {},
            "`weave` is set for unit-0; plans are for units that do not",
        ),
        (
            replace(BOTH, units=(replace(UNIT, models=(ELSEWHERE, UNIT.models[1])),)),
            UP,
            {},
            "u0: a is planned from /other, and served from /a; a plan changes no checkpoint",
        ),
        (
            replace(BOTH, units=(replace(UNIT, kv_bytes=10),)),
            UP,
            {},
            "u0: kv_bytes 10 hold no page of a; at least 4,194,304 are right",
        ),
    ],
)
def test_what_cannot_be_is_one_line_and_changes_nothing(
    file: Path, plan: PlacementPlan, units: tuple[EngineSpec, ...], fleet: dict[str, Any], message: str
) -> None:
    played = Played(*units, **fleet)
    write_plan(file, plan)
    with pytest.raises(ConfigError) as error:
        replan(file, played, apply=True)
    assert message in error.value.message
    assert "\n" not in error.value.message
    assert not played.orders


def test_replicas_that_go_are_told(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Played(spec("unit-0", "a", "b"), spec("unit-1", "a"), memory=5 * ALONE)
    write_plan(file, planned("ab"))
    replan(file, fleet, apply=False)
    assert "a has 1 replica then, instead of 2" in capsys.readouterr().out.splitlines()
    write_plan(file, planned("ab", "a"))
    replan(file, fleet, apply=False)
    assert "replica" not in capsys.readouterr().out


def asked(requests: int, minutes: int) -> list[TrafficHour]:
    """One hour of traffic, or as many minutes of it."""
    counts = {0: requests - 1, minutes - 1: 1} if minutes > 1 else {0: requests}
    made = TrafficHour(hour=HOURS, model="one", requests=requests, minutes=counts)
    return [replace(made, prompt_tokens=10 * requests, output_tokens=5 * requests)]


@pytest.mark.parametrize(
    ("requests", "minutes", "said"),
    [
        (2, 1, "the log has 1 minute, 2 requests: too little to size a fleet by; 1 hour and 100 requests, "),
        (2000, 59, "the log has 59 minutes, 2,000 requests: too little"),
        (99, 60, "the log has 1 hour, 99 requests: too little"),
        (100, 60, ""),
    ],
)
def test_little_traffic_is_told_and_not_applied(
    requests: int, minutes: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Played(spec("unit-0", "one"), spec("unit-1", "one"), memory=64 * GIB)
    fleet.asked = asked(requests, minutes)
    made = plan_by_traffic(fleet, make_profile(), "peak", apply=False)
    assert [model.name for unit in made.units for model in unit.models] == ["one"]
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    if not said:
        assert not warned
        assert plan_by_traffic(fleet, make_profile(), "peak", apply=True) == made
        return
    [line] = warned
    assert said in line
    with pytest.raises(ConfigError, match=r"`kvloom replan plan.json --apply` does it all the same") as error:
        plan_by_traffic(fleet, make_profile(), "peak", apply=True)
    assert error.value.message.startswith("--apply: ")
    assert said in error.value.message
    assert capsys.readouterr().out == ""


def test_a_fleet_that_no_plan_is_for_is_refused_before_one_is_made(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fleet = Played(spec("unit-0", "one"), scaled=("unit-0",))
    fleet.asked = asked(1000, 60)
    with pytest.raises(ConfigError, match=r"^--from-traffic: unit-0 come and go by themselves"):
        plan_by_traffic(fleet, make_profile(), "peak", apply=False)
    assert capsys.readouterr().out == ""


def test_names_that_nobody_has() -> None:
    assert new_names(["unit-1", "other"], 3) == ["unit-0", "unit-2", "unit-3"]
    assert new_names(["unit-0", "unit-1"], 1) == ["unit-2"]
    assert new_names([], 0) == []
