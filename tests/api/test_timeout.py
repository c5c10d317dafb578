"""Requests that take longer than the server lets them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from kvloom.api.app import create_app
from tests.api.scripted import ScriptedEngine, says


def ask(engine: ScriptedEngine, seconds: float | None, **body: Any) -> Any:
    http = TestClient(create_app(engine, request_seconds=seconds))
    return http.post("/v1/completions", json={"model": "tiny", "prompt": "hi", "max_tokens": 9} | body)


@pytest.mark.parametrize("prompt", ["hi", ["hi", "ho"]])
def test_before_the_first_byte(prompt: Any) -> None:
    engine = ScriptedEngine(says("hello world"), hold=2)
    answer = ask(engine, 0.05, prompt=prompt)
    assert answer.status_code == 504
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert error["code"] == "request_timeout"
    assert error["message"].startswith("the request took more than 0.05 s")
    assert len(engine.closed) == len(engine.bodies) > 0


def test_in_a_stream() -> None:
    engine = ScriptedEngine(says("hello world"), hold=2)
    answer = ask(engine, 3.0, stream=True)
    *chunks, last, _ = answer.text.split("\n\n")
    assert answer.status_code == 200
    assert chunks
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
    assert len(engine.closed) == 1


@pytest.mark.parametrize("seconds", [None, 60])
def test_in_time(seconds: float | None) -> None:
    assert ask(ScriptedEngine(says("hello world")), seconds).status_code == 200
