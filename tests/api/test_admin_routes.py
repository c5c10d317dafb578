"""What those who run a fleet ask over HTTP; the answers are what the commands read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace
from starlette.testclient import TestClient

from kvloom.api.auth import Keys
from kvloom.api.schemas.generation import ErrorAnswer
from kvloom.cluster.state import NodeSpec
from kvloom.types.service import Pair, Pairs
from kvloom.types.spec import ProgramSpec
from tests.api.fleet import Administered, administered

KEY = {"authorization": "Bearer admin"}


@pytest.fixture
def fleet() -> Administered:
    return administered(keys=Keys(admin=frozenset({"admin"})))


@pytest.fixture
def http(fleet: Administered) -> TestClient:
    return TestClient(fleet.app, headers=KEY)


def refused(answer: Any, status: int) -> str:
    assert answer.status_code == status, answer.text
    return ErrorAnswer.model_validate(answer.json()).error.message


def test_the_program(http: TestClient, fleet: Administered) -> None:
    """What is kept is what was asked for, and only what could be had."""
    asked = {"name": "balanced", "options": {"ratio": "0.25"}}
    answer = http.post("/admin/program", json=asked)
    state = {"name": "balanced", "options": {"ratio": 0.25}, "probation": True}
    assert answer.json() == http.get("/admin/program").json() == state
    said = refused(http.post("/admin/program", json={"name": "none_such"}), 400)
    assert "none_such" in said
    refused(http.post("/admin/program", content=b"{"), 400)
    assert fleet.kept.program == ProgramSpec("balanced", {"ratio": "0.25"})


def test_units(http: TestClient, fleet: Administered) -> None:
    everyone = http.get("/admin/units").json()
    assert [(unit["name"], unit["state"]) for unit in everyone] == [("unit-0", "up"), ("unit-1", "up")]
    assert [unit["models"] for unit in everyone] == [["tiny"], ["tiny"]]
    assert http.get("/admin/units/unit-1").json() == everyone[1]
    drained = http.post("/admin/units/unit-1/drain", json={"seconds": 1}).json()
    assert (drained["name"], drained["state"], drained["calls"]) == ("unit-1", "drained", 0)
    assert [name for name, unit in fleet.kept.units.items() if unit.drained] == ["unit-1"]
    admitted = http.post("/admin/units/unit-1/admit", json={}).json()
    assert (admitted["state"], admitted["models"]) == ("up", ["tiny"])
    assert not any(unit.drained for unit in fleet.kept.units.values())
    assert http.post("/admin/units/unit-0/restart", json={}).json()["state"] == "up"
    assert fleet.done == ["stop unit-0", "start unit-0"]


def test_nodes_of_a_fleet_that_has_none(http: TestClient, fleet: Administered) -> None:
    assert http.get("/admin/nodes").json() == []
    for what in ("drain", "admit"):
        said = refused(http.post(f"/admin/nodes/b/{what}", json={}), 404)
        assert said == "there is no node 'b'; the nodes: none"
    assert fleet.kept.revision == 0
    assert "kvloom_node_state{" not in http.get("/metrics").text


def test_metrics_tell_the_states_of_nodes(http: TestClient, fleet: Administered) -> None:
    """One that is part of the fleet, and has told nothing yet."""
    assert http.get("/admin/nodes").json() == []
    fleet.app.store.save(replace(fleet.kept, nodes={"host-b": NodeSpec()}), 1)
    assert [node["state"] for node in http.get("/admin/nodes").json()] == ["silent"]
    text = http.get("/metrics").text
    assert 'kvloom_node_state{node="host-b",state="silent"} 1.0' in text
    assert 'kvloom_node_state{node="host-b",state="lost"} 0.0' in text


def test_a_restart_that_fails(http: TestClient, fleet: Administered) -> None:
    fleet.problems["unit-0"] = "ended with exit code 3"
    answer = http.post("/admin/units/unit-0/restart", json={})
    said = refused(answer, 503)
    assert said == "unit-0 ended with exit code 3 as it started; it is tried again"


@pytest.mark.parametrize("what", ["drain", "admit", "restart"])
def test_what_cannot_be(http: TestClient, fleet: Administered, what: str) -> None:
    said = refused(http.post(f"/admin/units/unit-7/{what}", json={}), 404)
    assert said == "there is no unit 'unit-7'; the units: unit-0, unit-1"
    refused(http.post(f"/admin/units/unit-0/{what}"), 400)  # a page that a browser shows could send this
    refused(http.post(f"/admin/units/unit-0/{what}", json=7), 400)
    refused(http.get(f"/admin/units/unit-0/{what}"), 405)
    assert not fleet.done
    assert fleet.kept.revision == 0


@pytest.mark.parametrize("seconds", [-1, 1e9, "1"])
def test_times_that_are_none(http: TestClient, seconds: object) -> None:
    assert "seconds" in refused(http.post("/admin/units/unit-0/drain", json={"seconds": seconds}), 400)


def test_units_that_are_none(http: TestClient) -> None:
    refused(http.get("/admin/units/unit-7"), 404)
    refused(http.get("/admin/units/unit-0/steal"), 404)


def test_what_the_fleet_scheduler_asks_and_tells(http: TestClient, fleet: Administered) -> None:
    state = http.get("/admin/fleet").json()
    assert state["loads"]["unit-0"]["free_blocks"] == 8
    pairs = {"pairs": [{"source": "unit-0", "destination": "unit-1"}], "seconds": 1.5}
    assert http.post("/admin/pairs", json=pairs).json() == pairs
    assert fleet.paired == [Pairs(pairs=(Pair("unit-0", "unit-1"),), seconds=1.5)]
    for seconds in (0, -1, "1"):
        assert "seconds" in refused(http.post("/admin/pairs", json=pairs | {"seconds": seconds}), 400)
    refused(http.post("/admin/pairs", json={"pairs": [{"source": "unit-0"}], "seconds": 1}), 400)
    assert len(fleet.paired) == 1
    assert http.post("/admin/pairs", json=pairs | {"floor": 24.5}).json()["floor"] == 24.5


def test_a_rolling_restart_is_told_as_it_goes(http: TestClient, fleet: Administered) -> None:
    lines = [json.loads(line) for line in http.post("/admin/restart", json={}).text.splitlines()]
    assert [(line["component"], line["state"]) for line in lines] == [
        (component, state)
        for component in ("unit-0", "unit-1", "scheduler", "gateway")
        for state in ("restarting", "restarted")
    ]
    assert fleet.kept.gateway == 2
