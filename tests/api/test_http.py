"""The gateway as HTTP: statuses, headers, limits, keys, metrics and its own description."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from kvloom.api.app import create_app
from kvloom.api.schemas.chat import ChatAnswer, ChatChunk
from kvloom.api.schemas.generation import CompletionAnswer, ErrorAnswer, ModelList
from kvloom.types.errors import RequestQuarantined, Unavailable, UnknownModel
from kvloom.types.request import EndEvent
from tests.api.scripted import ScriptedEngine, card, says, serving
from tests.processes import DEADLINE

TEXT = "hello world"
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "hi"}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(says(TEXT))


@pytest.fixture
def http(engine: ScriptedEngine) -> Iterator[TestClient]:
    with TestClient(create_app(engine, max_body=50_000), raise_server_exceptions=False) as http:
        yield http


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_answers_have_the_forms_described(http: TestClient) -> None:
    CompletionAnswer.model_validate(http.post("/v1/completions", json=COMPLETION | {"logprobs": 2}).json())
    ChatAnswer.model_validate(http.post("/v1/chat/completions", json=CHAT | {"logprobs": True}).json())
    (listed,) = ModelList.model_validate(http.get("/v1/models").json()).data
    assert (listed.root, listed.parent) == (listed.id, None)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    text = http.post("/v1/completions", json=COMPLETION | options | {"logprobs": 2, "echo": True}).text
    assert [CompletionAnswer.model_validate(one) for one in events(text)][-1].usage is not None
    text = http.post("/v1/chat/completions", json=CHAT | options | {"logprobs": True}).text
    assert [ChatChunk.model_validate(one) for one in events(text)][-1].usage is not None


def test_a_stream_without_usage_says_nothing_of_it(http: TestClient) -> None:
    chunks = events(http.post("/v1/completions", json=COMPLETION | {"stream": True}).text)
    assert all("usage" not in chunk for chunk in chunks)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"max_tokens": 600}, "max_tokens"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"999": 1}}, "logit_bias"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.json"),
    ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"model": ""}, "model"),
    ({"store": True}, "store"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"bad_words": ["a"]}, "bad_words"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
]
BAD_COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [400]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt": ["a"] * 100, "n": 100}, "n"),
    ({"prompt": [1] * 512}, "prompt"),
    ({"prompt": [1] * 512, "max_tokens": 600}, "prompt"),
]
BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"max_completion_tokens": 600}, "max_completion_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": [{"role": "user", "content": "x " * 999}]}, "messages"),
    ({"messages": [{"role": "bob", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}, {"type": "image_url"}]}]},
        "messages[0].content[1]",
    ),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"modalities": "audio"}, "modalities"),
    ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"verbosity": "loud"}, "verbosity"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]},
        "messages[0].function_call",
    ),
]


@pytest.mark.parametrize(("change", "param"), BAD + BAD_COMPLETION)
def test_bad_completion_parameters_are_named(http: TestClient, change: dict[str, Any], param: str) -> None:
    check_error(http.post("/v1/completions", json=COMPLETION | change), 400, param)


@pytest.mark.parametrize(("change", "param"), BAD + BAD_CHAT)
def test_bad_chat_parameters_are_named(http: TestClient, change: dict[str, Any], param: str) -> None:
    check_error(http.post("/v1/chat/completions", json=CHAT | change), 400, param)


def check_error(answer: Any, status: int, param: str | None = None) -> str:
    assert answer.status_code == status, answer.text
    error = ErrorAnswer.model_validate(answer.json()).error
    assert error.param == param
    assert "Traceback" not in error.message
    return error.message


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 20_000, b'{"model":"tiny","prompt":"\\ud800"}',
     b'{"model":"tiny","prompt":"x","temperature":NaN}', b'{"model":"tiny","prompt":' + b"1" * 9000 + b"}"],
)  # fmt: skip
def test_what_is_no_request_is_a_400(http: TestClient, body: bytes) -> None:
    answer = http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    ErrorAnswer.model_validate(answer.json())


def test_unknown_fields_are_let_pass(http: TestClient) -> None:
    assert http.post("/v1/completions", json=COMPLETION | {"service_tier": "auto"}).status_code == 200


def test_what_asks_for_nothing_else_is_let_pass(http: TestClient) -> None:
    """Null passes, and so do values that ask for what is done anyway."""
    plain: dict[str, Any] = {"functions": None, "modalities": ["text"], "store": False}
    answer = http.post("/v1/chat/completions", json=CHAT | plain | {"add_generation_prompt": True})
    assert answer.status_code == 200, answer.text


def test_routes(http: TestClient) -> None:
    check_error(http.get("/v1/nothing"), 404)
    check_error(http.get("/v1/models/other"), 404, "model")
    answer = http.get("/v1/completions")
    check_error(answer, 405)
    assert answer.headers["allow"] == "POST"
    check_error(http.post("/v1/completions", json=COMPLETION | {"model": "other"}), 404, "model")


def test_chat_templates(http: TestClient, engine: ScriptedEngine) -> None:
    engine.cards = [
        card("none", None),
        card("picky", "{{ raise_exception('roles must alternate') }}"),
        card("broken", "{% if %}"),
        card("sly", "{{ ''.__class__.__mro__ }}"),
        card("endless", "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}"),
        card("nested", "{{ messages[0].content | tojson }}{% break %}"),
    ]  # fmt: skip
    said = {
        one.name: check_error(
            http.post("/v1/chat/completions", json=CHAT | {"model": one.name}), 400, "messages"
        )
        for one in engine.cards
    }
    assert "no chat template" in said["none"]
    assert "roles must alternate" in said["picky"]
    assert "broken" in said["broken"]


def test_a_model_whose_tokenizer_cannot_be_read(http: TestClient, engine: ScriptedEngine) -> None:
    """It alone is not served, and whoever asks for it learns why."""
    unreadable = {"bad": "{}", "worse": "no JSON", "none": "", "odd": '{"model": {"type": "Nonsense"}}'}
    engine.cards = [*(card(name, tokenizer=text) for name, text in unreadable.items()), card("tiny")]
    for name in unreadable:
        answer = http.post("/v1/completions", json=COMPLETION | {"model": name})
        assert f"model {name}: its tokenizer cannot be read: " in check_error(answer, 503, "model")
        check_error(http.get(f"/v1/models/{name}"), 503, "model")
    assert http.post("/v1/completions", json=COMPLETION).status_code == 200
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["tiny"]
    unknown = http.post("/v1/completions", json=COMPLETION | {"model": "other"})
    assert "served: tiny" in check_error(unknown, 404, "model")


def test_an_engine_that_raises_what_nobody_expects(http: TestClient, engine: ScriptedEngine) -> None:
    nothing: list[list[int]] = []
    engine.script = lambda *_: nothing[0]
    for stream in (False, True):
        message = check_error(http.post("/v1/completions", json=COMPLETION | {"stream": stream}), 500)
        assert "index" not in message


def test_an_end_that_is_the_requests_own_doing(http: TestClient, engine: ScriptedEngine) -> None:
    engine.break_after = 1
    why = "guided_regex: after 1 tokens it allows no token here"
    engine.break_with = EndEvent(0, "error", message=why, code="guide_failed", param="guided_regex")
    asked = COMPLETION | {"guided_regex": "a+"}
    assert check_error(http.post("/v1/completions", json=asked), 400, "guided_regex") == why
    answer = http.post("/v1/completions", json=asked | {"stream": True})
    assert answer.status_code == 200
    *_, last = answer.text.strip().split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], error["param"], error["message"]) == ("guide_failed", "guided_regex", why)
    assert error["type"] == "invalid_request_error"


def test_a_model_that_went_away(http: TestClient, engine: ScriptedEngine) -> None:
    engine.error = UnknownModel("gone", param="model")
    check_error(http.post("/v1/completions", json=COMPLETION | {"stream": True}), 404, "model")


def test_body_limits(http: TestClient) -> None:
    large = json.dumps(COMPLETION | {"prompt": "x" * 60_000}).encode()
    check_error(http.post("/v1/completions", content=large), 413)
    chunks = (large[at : at + 1000] for at in range(0, len(large), 1000))
    check_error(http.post("/v1/completions", content=chunks), 413)


def test_a_body_that_does_not_come(engine: ScriptedEngine) -> None:
    with serving(create_app(engine, body_seconds=0.1)) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 50\r\n\r\n"
            connection.sendall(head.encode() + b'{"model"')
            assert b" 408 " in connection.recv(1000).split(b"\r\n")[0]


def test_half_sent_requests_leave_no_trace(engine: ScriptedEngine, caplog: pytest.LogCaptureFixture) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n"
    with serving(create_app(engine)) as address:
        host, port = address.removeprefix("http://").split(":")
        for sent in (b"", b"POST /v1/comp", head, head + b"{", b"\x00\xff\r\n\r\n"):
            with socket.create_connection((host, int(port)), timeout=DEADLINE) as connection:
                connection.sendall(sent)
        answer = httpx.post(f"{address}/v1/completions", json=COMPLETION)
    assert answer.status_code == 200
    assert not [record for record in caplog.records if record.name.startswith("kvloom")]


def test_a_body_of_brackets_is_refused_before_it_is_read(engine: ScriptedEngine) -> None:
    with TestClient(create_app(engine)) as http:
        body = b'{"model":"tiny","prompt":' + b"[" + b"[]," * 200_000 + b"[]]}"
        assert "200000 lists" in check_error(http.post("/v1/completions", content=body), 400)


def test_health(http: TestClient, engine: ScriptedEngine) -> None:
    assert http.get("/health").json() == {"status": "ok", "units": {"unit-0": "up"}}
    engine.away = True
    check_error(http.get("/health"), 503)


def test_metrics(http: TestClient, engine: ScriptedEngine) -> None:
    http.post("/v1/completions", json=COMPLETION)
    http.post("/v1/completions", json=COMPLETION | {"n": 0})
    list(http.post("/v1/completions", json=COMPLETION | {"stream": True}).iter_lines())
    text = http.get("/metrics").text
    assert "_created" not in text
    for line in (
        'kvloom_requests_total{model="tiny",status="200"} 2.0',
        'kvloom_requests_total{model="tiny",status="400"} 1.0',
        'kvloom_requests_waiting{model="tiny",unit="unit-0"} 1.0',
        'kvloom_requests_running{model="tiny",unit="unit-0"} 2.0',
        'kvloom_kv_blocks_used{model="tiny",unit="unit-0"} 40.0',
        'kvloom_kv_blocks_free{unit="unit-0"} 60.0',
        'kvloom_preemptions_total{model="tiny",unit="unit-0"} 3.0',
        'kvloom_displaced_requests_total{model="tiny",unit="unit-0"} 4.0',
        'kvloom_unread_sequences_total{model="tiny",unit="unit-0"} 5.0',
        'kvloom_unread_blocks_total{model="tiny",unit="unit-0"} 6.0',
        'kvloom_request_output_tokens_total{model="tiny"} 6.0',
        'kvloom_time_to_first_token_seconds_count{model="tiny"} 1.0',
        'kvloom_time_per_output_token_seconds_count{model="tiny"} 1.0',
        "kvloom_engines_up 1.0",
        'kvloom_unit_state{state="up",unit="unit-0"} 1.0',
        'kvloom_unit_state{state="drained",unit="unit-0"} 0.0',
        'kvloom_requests_without_unit{model="tiny"} 0.0',
        'kvloom_requests_without_unit{model="awaited"} 2.0',
        'kvloom_requests_waiting_oldest_seconds{model="tiny",unit="unit-0"} 7.0',
        'kvloom_slo_ttft_seconds{model="tiny",unit="unit-0"} 2.0',
        'kvloom_slo_tpot_seconds{model="tiny",unit="unit-0"} 0.2',
    ):
        assert line in text, line
    engine.away = True
    assert "kvloom_engines_up 0.0" in http.get("/metrics").text


def test_quarantined_requests_are_counted(http: TestClient, engine: ScriptedEngine) -> None:
    """Refused at once, or ended after some tokens; other failures are not."""
    engine.error = RequestQuarantined("engines died of it")
    check_error(http.post("/v1/completions", json=COMPLETION), 400)
    engine.error = Unavailable("away")
    check_error(http.post("/v1/completions", json=COMPLETION), 503)
    engine.error, engine.break_after = None, 2
    for engine.break_with in (RequestQuarantined("engines died of it"), Unavailable("away")):
        list(http.post("/v1/completions", json=COMPLETION | {"stream": True}).iter_lines())
    assert 'kvloom_requests_quarantined_total{model="tiny"} 2.0' in http.get("/metrics").text


def test_two_gateways_in_one_process(engine: ScriptedEngine) -> None:
    for app in (create_app(engine), create_app(engine)):
        with TestClient(app) as http:
            http.post("/v1/completions", json=COMPLETION)
            assert 'kvloom_requests_total{model="tiny",status="200"} 1.0' in http.get("/metrics").text


def test_description(http: TestClient) -> None:
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert {"/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/metrics"} <= set(
        document["paths"]
    )
    text = http.get("/docs").text
    assert "max_completion_tokens" in text
    assert "<script" not in text
    assert "https://" not in text


def test_the_document_tells_how_streams_end(http: TestClient) -> None:
    """Each stream of events is asked for, and its last event is one that the document names."""
    paths, asked = http.get("/openapi.json").json()["paths"], set[str]()
    bodies = {
        "/v1/completions": COMPLETION,
        "/v1/chat/completions": CHAT,
        "/v1/responses": {"model": "tiny", "input": "hi"},
        "/v1/messages": {"model": "tiny", "max_tokens": 9, "messages": CHAT["messages"]},
    }
    for path, methods in paths.items():
        content = methods.get("post", {}).get("responses", {}).get("200", {}).get("content", {})
        if "application/json" in content and (events := content.get("text/event-stream")):
            told = http.post(path, json=bodies[path] | {"stream": True}).text.rstrip()
            last = told.rpartition("\n\n")[2].splitlines()[0].partition(": ")[2]
            assert f"`{last}`" in events["schema"]["description"]
            asked.add(path)
    assert asked == bodies.keys()


def test_the_gateway_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, kvloom.api.app; print(sorted({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
