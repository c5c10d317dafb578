"""A request's id, which every answer has, and the line that is logged of it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from kvloom.api.app import create_app
from kvloom.api.auth import Keys
from tests.api.scripted import ScriptedEngine, says, serving

SECRET = "tell nobody of this"


def asked(path: str, body: object = None, **headers: str) -> tuple[httpx.Response, dict[str, Any]]:
    """The answer, and the line that was logged."""
    lines: list[str] = []
    app = create_app(ScriptedEngine(says(SECRET)), access_log=lines.append)
    with serving(app) as address, httpx.Client(base_url=address) as client:
        answer = client.request("POST" if body else "GET", path, json=body, headers=headers)
    (line,) = lines
    assert SECRET not in line
    return answer, json.loads(line)


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_tells_of_a_request_but_not_what_was_said(stream: bool) -> None:
    body = {"model": "tiny", "prompt": SECRET, "max_tokens": 8, "stream": stream}
    answer, line = asked("/v1/completions", body, **{"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == line["id"] == "mine-1"
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert line["model"] == "tiny"
    assert line["prompt_tokens"] > 0
    assert line["output_tokens"] > 0
    assert ("ttft" in line) is stream
    assert line["seconds"] >= line.get("ttft", 0.0)
    told = answer.text.removeprefix("data: ").partition("\n")[0]
    assert line["request"] == json.loads(told)["id"]


def test_errors_have_an_id_too() -> None:
    for path, body, status in (
        ("/nowhere", None, 404),
        ("/v1/completions", {"model": "other", "prompt": "x"}, 404),
    ):
        answer, line = asked(path, body, **{"x-request-id": "mine"})
        assert (answer.status_code, line["status"]) == (status, status)
        assert answer.headers["x-request-id"] == "mine"
        assert "request" not in line


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": SECRET, "max_tokens": -1}, "tiny"),
        ("/v1/completions", {"model": "tiny", "prompt": SECRET * 9000, "max_tokens": -1}, "tiny"),
        ("/v1/chat/completions", {"model": "tiny"}, "tiny"),
        ("/v1/messages", {"model": "tiny", "messages": []}, "tiny"),
        ("/api/chat", {"model": "tiny:latest", "messages": 1}, "tiny"),
        ("/v1/completions", {"model": "other", "prompt": SECRET, "max_tokens": -1}, "unknown"),
        ("/v1/completions", {"model": 7, "prompt": SECRET}, "unknown"),
        ("/v1/completions", [SECRET], "unknown"),
    ],
)
def test_a_refused_request_has_the_name_of_its_model_if_that_is_served(
    path: str, body: object, model: str
) -> None:
    answer, line = asked(path, body)
    assert (answer.status_code, line["status"], line["model"]) == (400, 400, model)


def test_a_stream_that_cannot_be_resumed_has_the_name_of_its_model() -> None:
    body = {"model": "tiny", "prompt": SECRET}
    answer, line = asked("/v1/completions", body, **{"last-event-id": "x-1"})
    assert (answer.status_code, line["model"]) == (400, "tiny")


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "t\tb"])
def test_an_id_that_is_none_is_replaced(given: str) -> None:
    answer, line = asked("/health", **{"x-request-id": given})
    assert answer.headers["x-request-id"] == line["id"] != given
    assert len(line["id"]) == 24


def test_what_the_fleet_asks_itself_has_no_line() -> None:
    lines: list[str] = []
    keys = Keys(admin=frozenset({"an-admin"}), secret="the-fleets")
    app = create_app(ScriptedEngine(says(SECRET)), keys=keys, access_log=lines.append)
    with serving(app) as address, httpx.Client(base_url=address) as client:
        for key in ("the-fleets", "an-admin", "wrong"):
            client.get("/v1/models", headers={"authorization": f"Bearer {key}", "x-request-id": key})
    assert [json.loads(line)["id"] for line in lines] == ["an-admin", "wrong"]
