"""Streams that are resumed by `Last-Event-ID`: at every event, with frames that are cut anew, and bad ids."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from kvloom.api.app import create_app
from kvloom.types.request import EndEvent, Event, PromptEvent, StartGenerate
from tests.api.scripted import ScriptedEngine, card, says, tokens
from tests.examples import examples

Told = list[tuple[str, dict[str, Any]]]  # of each event its id and what it says
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALLS = '[TOOL_CALLS][{"name": "look", "arguments": {"a": "é"}}, {"name": "look", "arguments": {}}]'
TEXTS = ("hello wörld, 🦊 stops", "the quick brown fox stops here, hello", f"so {CALLS}", "é")
USAGE = {"include_event_ids": True, "include_usage": True}
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": HI}),
    (CHAT, {"messages": HI, "n": 4, "stream_options": USAGE}),
    (CHAT, {"messages": HI, "n": 3, "logprobs": True, "top_logprobs": 2, "stop": ["fox", "st"]}),
    (CHAT, {"messages": HI, "n": 4, "tools": [TOOL], "stream_options": USAGE}),
    (COMPLETIONS, {"prompt": "hi"}),
    (COMPLETIONS, {"prompt": ["hi", "quick"], "n": 2, "echo": True, "logprobs": 2, "max_tokens": 9}),
    (COMPLETIONS, {"prompt": ["hi", "fox"], "n": 3, "stop": "x s", "stream_options": USAGE}),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": 0, "echo": True, "logprobs": 1}),
)


class Uneven(ScriptedEngine):
    """An engine that cuts its frames anew at every run, and lets each choice run ahead of the others."""

    rng = random.Random(7)

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        queues: dict[int, list[Event]] = {choice: [] for choice in range(body.n)}
        async for frame in super().start_generate(body):
            for event in frame:
                if isinstance(event, PromptEvent):
                    yield [event]
                else:
                    queues[event.choice].append(event)
        while queues:
            choice = self.rng.choice(list(queues))
            queue = queues[choice]
            frame = [queue.pop(0) for _ in range(min(len(queue), self.rng.randint(1, 4)))]
            if len(queue) == 1 and isinstance(queue[0], EndEvent):  # a stop token comes with its end
                frame.append(queue.pop())
            if not queue:
                del queues[choice]
            yield frame


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    template = str(card().chat_template) + "{# [TOOL_CALLS] #}"
    return Uneven(says(*TEXTS), cards=[card(template=template)])


@pytest.fixture
def http(engine: ScriptedEngine) -> TestClient:
    return TestClient(create_app(engine), raise_server_exceptions=False)


def body_of(asked: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny", "stream": True, "stream_options": {"include_event_ids": True}} | asked


def ask(http: TestClient, path: str, body: dict[str, Any], last: str = "") -> Told:
    answer = http.post(path, json=body, headers={"last-event-id": last} if last else {})
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    told: Told = []
    for event in answer.text.split("\n\n")[:-2]:
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        told.append((fields["id"], json.loads(fields["data"])))
    return told


def joined(told: Told) -> dict[Any, Any]:
    """What the events say of each choice, and beside the choices, each once."""
    whole: dict[Any, Any] = {"heads": {(one["id"], one["created"], one["model"]) for _, one in told}}
    for _, chunk in told:
        if chunk.get("usage"):
            assert "usage" not in whole
            whole["usage"] = chunk["usage"]
        for choice in chunk["choices"]:
            known = whole.setdefault(choice["index"], {"roles": 0, "text": "", "entries": [], "calls": []})
            assert "finish" not in known
            delta = choice.get("delta", {})
            known["roles"] += "role" in delta
            known["text"] += delta.get("content", "") + choice.get("text", "")
            known["calls"] += delta.get("tool_calls", [])
            logprobs = choice["logprobs"] or {}
            columns = [value for key, value in logprobs.items() if key not in ("content", "refusal")]
            known["entries"] += logprobs.get("content") or [list(row) for row in zip(*columns, strict=True)]
            if choice["finish_reason"]:
                known["finish"] = choice["finish_reason"]
    return whole


@pytest.mark.parametrize(("path", "asked"), ASKED)
def test_a_stream_goes_on_after_each_of_its_events(
    path: str, asked: dict[str, Any], http: TestClient
) -> None:
    for _ in range(examples(2)):
        body = body_of(asked)
        whole = ask(http, path, body)
        expected = joined(whole)
        for at, (last, _) in enumerate(whole):
            rest = ask(http, path, body, last)
            assert joined(whole[: at + 1] + rest) == expected
            if rest:  # and once more, after an event of the resumed stream
                again = ask(http, path, body, rest[0][0])
                assert joined([*whole[: at + 1], rest[0], *again]) == expected


def test_the_seeds_that_were_drawn_are_drawn_again(http: TestClient, engine: ScriptedEngine) -> None:
    body = body_of({"prompt": ["hi", "hi", "fox"]})
    engine.bodies.clear()
    told = ask(http, COMPLETIONS, body)
    first = [one.sampling.seed for one in engine.bodies]
    assert len(set(first)) == 3
    names = {one.request for one in engine.bodies}
    engine.bodies.clear()
    ask(http, COMPLETIONS, body, told[0][0])
    assert [one.sampling.seed for one in engine.bodies] == first
    assert not names & {one.request for one in engine.bodies}  # the first stream may still run


def test_nothing_is_generated_for_a_client_that_has_all(http: TestClient, engine: ScriptedEngine) -> None:
    for more in ({}, {"stream_options": USAGE}):
        body = body_of({"prompt": "hi"} | more)
        last = ask(http, COMPLETIONS, body)[-1][0]
        engine.bodies.clear()
        assert ask(http, COMPLETIONS, body, last) == []
        assert not engine.bodies


def test_streams_have_ids_only_if_asked_for(http: TestClient) -> None:
    body = body_of({"prompt": "hi", "stream_options": {}})
    assert "id: " not in http.post(COMPLETIONS, json=body).text


def test_bad_ids_are_refused_before_anything_is_generated(http: TestClient, engine: ScriptedEngine) -> None:
    body = body_of({"prompt": "hi"})
    good = ask(http, COMPLETIONS, body)[1][0]
    head = good.partition(".")[0]
    bad = ["x", "17", f"{head}", f"{head}.1", f"{head}.1.0.0.0z,", f"{head}.-1.0.0.0", "é"]
    bad += [f"{head}.{'f' * 9}.0.0.0", f"{head}." + "1.0.0.0," * 2000, f"{head}.donex", f"{good},{good}"]
    bad += [f"{'A' * 48}.done", f"{head}.1.0.0.0,1.0.0.0", good + " z", "\x00"]
    engine.bodies.clear()
    for last in bad:
        answer = http.post(COMPLETIONS, json=body, headers={b"last-event-id": last.encode()})
        said = answer.json()["error"]
        assert (answer.status_code, said["param"]) == (400, "Last-Event-ID"), last
        assert "\n" not in said["message"]
        assert len(said["message"]) < 200
    assert not engine.bodies


@pytest.mark.parametrize("change", [{"prompt": "ho"}, {"seed": 1}, {"n": 2}, {"stream": False}])
def test_an_id_of_another_request_is_refused(
    change: dict[str, Any], http: TestClient, engine: ScriptedEngine
) -> None:
    body = body_of({"prompt": "hi"})
    last = ask(http, COMPLETIONS, body)[0][0]
    engine.bodies.clear()
    if "stream" in change:
        change |= {"stream_options": None}
    answer = http.post(COMPLETIONS, json=body | change, headers={"last-event-id": last})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")
    assert not engine.bodies


@pytest.mark.parametrize("position", ["ffffffff.0.0.0", "1.0.0.1"])
def test_a_position_that_the_stream_has_not_is_status_400(position: str, http: TestClient) -> None:
    body = body_of({"prompt": "hi"})
    head = ask(http, COMPLETIONS, body)[0][0].partition(".")[0]
    answer = http.post(COMPLETIONS, json=body, headers={"last-event-id": f"{head}.{position}"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


@pytest.mark.parametrize("position", ["0.ffffffff.0.0", "0.0.1.0"])
def test_a_forged_count_ends_in_an_error(position: str, http: TestClient) -> None:
    body = body_of({"prompt": "hi"})
    head = ask(http, COMPLETIONS, body)[0][0].partition(".")[0]
    answer = http.post(COMPLETIONS, json=body, headers={"last-event-id": f"{head}.{position}"})
    *_, last = answer.text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["param"] == "Last-Event-ID"


def test_the_page_shows_the_example() -> None:
    root = Path(__file__).resolve().parents[2]
    section = (root / "docs" / "serving.md").read_text("utf-8").split("\n## Resuming a stream\n")[1]
    shown = section.split("```python\n")[1].split("```")[0]
    assert shown in (root / "examples" / "resume.py").read_text("utf-8")


def test_too_many_choices_for_ids(http: TestClient) -> None:
    answer = http.post(COMPLETIONS, json=body_of({"prompt": ["hi"] * 2, "n": 65}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options.include_event_ids"


def test_a_model_that_answers_otherwise_now_is_no_wrong_end(http: TestClient, engine: ScriptedEngine) -> None:
    body = body_of({"prompt": "hi"})
    last = ask(http, COMPLETIONS, body)[2][0]
    before, engine.script = engine.script, lambda *_: tokens("what is this fox")
    answer = http.post(COMPLETIONS, json=body, headers={"last-event-id": last})
    engine.script = before
    assert answer.status_code == 400
    assert "another answer" in answer.json()["error"]["message"]
