"""What a person is told to try, and that it is worth trying."""

from __future__ import annotations

import json
import shlex
from io import StringIO
from typing import Literal

import pytest
from msgspec import structs
from rich.console import Console

from kvloom.config.config import DEMO
from kvloom.serve.screen import FleetReady, Screen, curl
from kvloom.types.clock import WallClock
from kvloom.types.request import Task, route_of
from tests.scripted import CARD


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_the_demo_fleet_is_asked_for_a_sum(route: str) -> None:
    models = {name: str(DEMO / name) for name in ("guide", "sums")}
    command = shlex.split(curl(FleetReady("http://h:1", models, dict.fromkeys(models, route))))
    body = json.loads(command[-1])
    assert (body["model"], body["temperature"]) == ("sums", 0)
    assert "17 + 25" in str(body)
    assert command[1] == f"http://h:1/v1/{route}"


def test_another_fleet_is_greeted() -> None:
    command = shlex.split(curl(FleetReady("https://h:1", {"b": "/m/b"}, {}, authority="/a b/cert.pem")))
    assert command[:4] == ["curl", "--cacert", "/a b/cert.pem", "https://h:1/v1/completions"]
    routes = {"b": "chat/completions"}
    command = shlex.split(curl(FleetReady("http://h:1", {"b": "/m/b", "a": "/m/a"}, routes, locked=True)))
    assert json.loads(command[-1]) == {
        "model": "b",
        "max_tokens": 32,
        "messages": [{"role": "user", "content": "Hello"}],
    }
    assert "Authorization: Bearer $KVLOOM_API_KEY" in command


@pytest.mark.parametrize(
    ("task", "route", "asks"), [("embed", "embeddings", "input"), ("score", "rerank", "query")]
)
def test_a_model_that_makes_vectors_or_scores_is_asked_for_them(task: Task, route: str, asks: str) -> None:
    routes = {"b": route_of(structs.replace(CARD, task=task))}
    command = shlex.split(curl(FleetReady("http://h:1", {"b": "/m/b"}, routes)))
    body = json.loads(command[-1])
    assert command[1] == f"http://h:1/v1/{route}"
    assert (body["model"], body[asks], "max_tokens" in body) == ("b", "Hello", False)


def test_the_access_log_moves_no_cursor() -> None:
    written = StringIO()
    screen = Screen(Console(file=written, width=400), WallClock())
    screen.log("gateway", 'INFO kvloom.access: {"id":"a","path":"/x\\u001b[2J\\ny z","status":404}')
    screen.show_as("error", "text")
    screen.log("gateway", "INFO kvloom.pulse: nobody sees this")
    screen.show_as("info", "json")
    screen.log("gateway", 'INFO kvloom.access: {"id":"b","path":"/x\\ny","status":404}')
    assert screen.close()
    first, second = written.getvalue().splitlines()
    assert first.endswith("gateway | id=a path='/x\\x1b[2J\\ny z' status=404")
    found = json.loads(second)
    assert (found["component"], found["id"], found["path"], found["level"]) == (
        "gateway",
        "b",
        "/x\ny",
        "info",
    )


def shown(level: str, form: Literal["text", "json"], *lines: tuple[str, str]) -> list[str]:
    """What is shown of lines of components, the fleet's own words among them."""
    written = StringIO()
    screen = Screen(Console(file=written, width=400), WallClock())
    screen.show_as(level, form)
    screen.step("starting the engine", "unit-0")
    screen.done("unit-0")
    screen.log("unit-0", "answers again", "INFO")
    for component, line in lines:
        screen.log(component, line)
    screen.warn("unit-1", "was killed")
    assert screen.close()
    return written.getvalue().splitlines()


ACCESS_LINE = 'INFO kvloom.access: {"id":"a","path":"/x","status":200}'


def test_a_level_leaves_out_what_is_less_urgent_but_no_line_of_the_access_log() -> None:
    (access,) = shown("error", "text", ("gateway", ACCESS_LINE), ("unit-0", "WARNING kvloom.x: careful"))
    assert access.endswith("gateway | id=a path=/x status=200")
    lines = shown("warning", "text", ("gateway@b", ACCESS_LINE), ("unit-0", "Segmentation fault"))
    assert [line.partition("| ")[2] for line in lines] == [
        "id=a path=/x status=200",
        "Segmentation fault",
        "was killed",
    ]


def test_a_traceback_is_of_its_record() -> None:
    said = "ERROR kvloom.x: it failed\x1fTraceback (most recent call last):\x1fValueError: bad"
    first, _ = map(json.loads, shown("warning", "json", ("unit-0", said)))
    assert (first["level"], first["logger"]) == ("error", "kvloom.x")
    assert first["message"] == "it failed\nTraceback (most recent call last):\nValueError: bad"
    assert [line.partition("| ")[2] for line in shown("error", "text", ("unit-0", said))] == [
        "ERROR kvloom.x: it failed",
        "Traceback (most recent call last):",
        "ValueError: bad",
    ]


def test_the_fleets_own_log_has_its_levels() -> None:
    said = ("fleet", "INFO kvloom.x: one\nINFO kvloom.access: two"), ("fleet", "ERROR kvloom.x: three")
    assert [json.loads(line)["message"] for line in shown("error", "json", *said)] == ["three"]


def test_no_log_stands_for_what_the_screen_knows() -> None:
    claims = '{"at":"1970","level":"critical","component":"unit-9","logger":"none","id":1}'
    lines = [(name, f"INFO kvloom.access: {claims}") for name in ("gateway", "unit-0")]
    *_, access, said, _ = map(json.loads, shown("info", "json", *lines))
    assert (access["level"], access["component"], access["logger"]) == ("info", "gateway", "kvloom.access")
    assert access["at"].startswith("2")
    assert access["id"] == 1
    assert (said["component"], said["message"]) == ("unit-0", claims)
