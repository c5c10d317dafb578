"""Log-probabilities of prompts that are echoed, at their shortest."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from kvloom.api.app import create_app
from tests.api.scripted import ScriptedEngine, says, tokens

A, B = tokens("a")[0], tokens("b")[0]


def ask(**parameters: Any) -> list[dict[str, Any]]:
    """The choices, or all of a stream's."""
    body = {"model": "tiny", "echo": True, "logprobs": 1, **parameters}
    with TestClient(create_app(ScriptedEngine(says("xy")))) as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        choices: list[dict[str, Any]] = answer.json()["choices"]
        return choices
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
    return [choice for event in events for choice in event["choices"]]


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_known_of_the_only_token(stream: bool) -> None:
    first, *rest = [choice["logprobs"] for choice in ask(prompt=[A], max_tokens=2, stream=stream)]
    for more in rest:
        for name in first:
            first[name] += more[name]
    assert first["tokens"] == ["a", "x", "y"]
    assert first["token_logprobs"] == [None, -0.5, -0.5]
    assert first["top_logprobs"][0] is None
    assert all(first["top_logprobs"][1:])
    assert first["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_of_one_token_is_scored(stream: bool) -> None:
    (choice,) = ask(prompt=[A], max_tokens=0, stream=stream)
    assert (choice["text"], choice["finish_reason"]) == ("a", "length")
    assert choice["logprobs"] == {
        "tokens": ["a"],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }


def test_beside_a_longer_prompt_and_for_each_choice() -> None:
    choices = ask(prompt=[[A], [A, B]], max_tokens=1, n=2)
    said = [choice["logprobs"]["token_logprobs"] for choice in choices]
    assert said == [[None, -0.5]] * 2 + [[None, -0.5, -0.5]] * 2
