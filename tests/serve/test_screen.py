"""What a person is told to try, and that it is worth trying."""

from __future__ import annotations

import json
import shlex
from io import StringIO

import pytest
from rich.console import Console

from kvloom.config.config import DEMO
from kvloom.serve.screen import Screen, curl
from kvloom.types.clock import WallClock


@pytest.mark.parametrize("chat", [["guide", "sums"], []])
def test_the_demo_fleet_is_asked_for_a_sum(chat: list[str]) -> None:
    models = {name: str(DEMO / name) for name in ("guide", "sums")}
    command = shlex.split(curl("http://h:1", models, chat, locked=False))
    body = json.loads(command[-1])
    assert (body["model"], body["temperature"]) == ("sums", 0)
    assert "17 + 25" in str(body)
    assert command[1] == f"http://h:1/v1/{'chat/' if chat else ''}completions"


def test_another_fleet_is_greeted() -> None:
    command = shlex.split(curl("https://h:1", {"b": "/m/b"}, [], locked=False, authority="/a b/cert.pem"))
    assert command[:4] == ["curl", "--cacert", "/a b/cert.pem", "https://h:1/v1/completions"]
    command = shlex.split(curl("http://h:1", {"b": "/m/b", "a": "/m/a"}, ["b"], locked=True))
    assert json.loads(command[-1]) == {
        "model": "b",
        "max_tokens": 32,
        "messages": [{"role": "user", "content": "Hello"}],
    }
    assert "Authorization: Bearer $KVLOOM_API_KEY" in command


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
