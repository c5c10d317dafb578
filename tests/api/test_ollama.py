"""Ollama's API by its official client: the same prompt and the same tokens as a chat of OpenAI's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from starlette.testclient import TestClient

from kvloom.api.app import create_app
from kvloom.api.auth import Keys
from kvloom.api.schemas.ollama import OllamaChatAnswer, OllamaError, OllamaGenerateAnswer
from kvloom.types.errors import QueueFull, Unavailable
from kvloom.types.load import UnitLoad, WeightLoad
from tests.api.scripted import TEMPLATE, ScriptedEngine, card, says, serving, token, tokens
from tests.cluster import loads

TEXT = "hello world, naïve 🦊 fox"
HI: list[Any] = [{"role": "user", "content": "hi"}]
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CALL = '[{"name": "weather", "arguments": {"city": "Zürich"}}]'
THINKS = TEMPLATE + "{# <think></think> #}{% if enable_thinking is false %}</think>{% endif %}"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(says(TEXT))


@pytest.fixture
def client(engine: ScriptedEngine) -> Iterator[ollama.Client]:
    with serving(create_app(engine)) as url:
        yield ollama.Client(url)


def test_a_chat(client: ollama.Client, engine: ScriptedEngine) -> None:
    asked = [{"role": "system", "content": "be brief"}, *HI]
    told = client.chat("tiny", asked, options={"num_predict": 99})
    assert (told.message.role, told.message.content) == ("assistant", TEXT)
    assert (told.model, told.done, told.done_reason) == ("tiny", True, "stop")
    (body,) = engine.bodies
    assert body.prompt == tokens("<s><|system|>be brief\n<|user|>hi\n<|assistant|>")
    assert body.sampling.max_tokens == 99
    assert (told.prompt_eval_count, told.eval_count) == (len(body.prompt), len(tokens(TEXT)) + 1)
    assert told.total_duration is not None
    assert told.total_duration >= (told.load_duration or 0) + (told.eval_duration or 0) > 0


def test_a_stream_is_the_same_answer(client: ollama.Client) -> None:
    *lines, last = client.chat("tiny", HI, stream=True)
    assert "".join(line.message.content or "" for line in lines) == TEXT
    assert len(lines) > 1
    assert not any(line.done or line.done_reason for line in lines)
    whole = client.chat("tiny", HI)
    assert (last.done, last.done_reason, last.message.content) == (True, "stop", "")
    assert (last.prompt_eval_count, last.eval_count) == (whole.prompt_eval_count, whole.eval_count)
    assert last.prompt_eval_duration is not None


def test_a_stream_unless_it_is_refused(engine: ScriptedEngine) -> None:
    with TestClient(create_app(engine)) as http:
        streamed = http.post("/api/chat", json={"model": "tiny", "messages": HI})
        whole = http.post("/api/generate", json={"model": "tiny", "prompt": "hi", "stream": False})
    assert streamed.headers["content-type"] == "application/x-ndjson"
    lines = [OllamaChatAnswer.model_validate_json(line) for line in streamed.text.splitlines()]
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert whole.headers["content-type"] == "application/json"
    assert OllamaGenerateAnswer.model_validate(whole.json()).response == TEXT


def test_generate(client: ollama.Client, engine: ScriptedEngine) -> None:
    told = client.generate("tiny", "hi", system="be brief", options={"num_predict": 2})
    assert (told.done_reason, told.eval_count) == ("length", 2)
    parts = list(client.generate("tiny", "<|user|>hi", raw=True, stream=True, options={"num_predict": -1}))
    assert "".join(part.response or "" for part in parts) == TEXT
    templated, raw = engine.bodies
    assert templated.prompt == tokens("<s><|system|>be brief\n<|user|>hi\n<|assistant|>")
    assert raw.prompt == tokens("<s><|user|>hi")
    assert raw.sampling.max_tokens == 512 - len(raw.prompt)


def test_the_same_tokens_as_a_chat(client: ollama.Client, engine: ScriptedEngine) -> None:
    turns = [*HI, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "hello <s> world"}]
    drawn = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 5, "stop": ["x"]}
    drawn |= {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    own = {"num_predict": 7, "repeat_penalty": 1.5, "num_ctx": 512, "num_gpu": 1}
    client.chat("tiny", turns, options=drawn | own, tools=[TOOL], keep_alive="5m")
    theirs = {"max_tokens": 7, "repetition_penalty": 1.5, "tools": [TOOL]}
    with TestClient(create_app(engine)) as http:
        http.post("/v1/chat/completions", json={"model": "tiny", "messages": turns} | drawn | theirs)
    one, other = engine.bodies
    assert one.prompt == other.prompt
    assert one.sampling == other.sampling


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}])
def test_formats(client: ollama.Client, engine: ScriptedEngine, form: Any) -> None:
    client.chat("tiny", HI, format=form, options={"seed": 1})
    schema = {"type": "json_schema", "json_schema": {"schema": form}}
    asked = {"type": "json_object"} if form == "json" else schema
    with TestClient(create_app(engine)) as http:
        chat = {"model": "tiny", "messages": HI, "seed": 1, "response_format": asked}
        http.post("/v1/chat/completions", json=chat).raise_for_status()
    one, other = engine.bodies
    assert one.sampling.guide == other.sampling.guide is not None


@pytest.mark.parametrize("stream", [False, True])
def test_tools(client: ollama.Client, engine: ScriptedEngine, stream: bool) -> None:
    engine.script = lambda *_: [*tokens("See. "), token("[TOOL_CALLS]"), *tokens(CALL)]
    engine.cards = [card(template=TEMPLATE + "{# [TOOL_CALLS] #}")]
    if stream:
        lines = [line.message for line in client.chat("tiny", HI, tools=[TOOL], stream=True)]
    else:
        lines = [client.chat("tiny", HI, tools=[TOOL]).message]
    assert "".join(line.content or "" for line in lines) == "See."
    (call,) = [call for line in lines for call in line.tool_calls or []]
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Zürich"})
    said = {"role": "assistant", "content": "", "tool_calls": [call.model_dump()]}
    client.chat("tiny", [*HI, said, {"role": "tool", "tool_name": "weather", "content": "rain"}])
    assert engine.bodies[-1].prompt == tokens("<s><|user|>hi\n<|assistant|>\n<|tool|>rain\n<|assistant|>")


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts(client: ollama.Client, engine: ScriptedEngine, stream: bool) -> None:
    engine.script = says("<think>hm</think>hello")
    engine.cards = [card(template=THINKS)]
    for think in (None, True, "high"):
        asked: dict[str, Any] = {"model": "tiny", "stream": stream, "think": think}
        for told in (client.chat(messages=HI, **asked), client.generate(prompt="hi", **asked)):
            parts: list[Any] = list(told) if stream else [told]
            said = [getattr(part, "message", part) for part in parts]
            assert "".join(part.thinking or "" for part in said) == "hm"
            assert "".join(part.get("content") or part.get("response") or "" for part in said) == "hello"
    assert all(body.prompt == engine.bodies[0].prompt for body in engine.bodies)
    client.chat("tiny", HI, think=False)
    assert engine.bodies[-1].prompt == engine.bodies[0].prompt + tokens("</think>")


def test_a_model_that_has_no_thoughts(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="has no thoughts") as raised:
        client.chat("tiny", HI, think=True)
    assert raised.value.status_code == 400


def test_fields_that_ask_for_nothing(engine: ScriptedEngine) -> None:
    """Clients such as LangChain's ChatOllama send them with every request."""
    turn: dict[str, Any] = {"role": "user", "content": "hi", "images": []}
    call: dict[str, Any] = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": {}}}
    past = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "tool", "content": "rain", "tool_call_id": "1"}
    empty: dict[str, Any] = {
        "options": {"num_ctx": None, "mirostat": 0, "typical_p": 1.0},
        "tools": [],
        "format": "",
    }
    empty |= {"keep_alive": None, "think": None, "logprobs": False, "stream": False}
    asked: dict[str, Any]
    with TestClient(create_app(engine)) as http:
        asked = {"model": "tiny", "messages": [turn, *past, result]} | empty
        assert http.post("/api/chat", json=asked).json()["message"] == {"role": "assistant", "content": TEXT}
        asked = {"model": "tiny", "prompt": "hi", "suffix": "", "template": "", "context": []}
        assert (
            http.post("/api/generate", json=asked | {"raw": False, "stream": False}).json()["response"]
            == TEXT
        )


def test_nothing_asked(client: ollama.Client, engine: ScriptedEngine) -> None:
    chat, generated = client.chat("tiny"), client.generate("tiny", keep_alive=0)
    assert (chat.done, chat.done_reason, chat.message.content) == (True, "load", "")
    assert (generated.done, generated.done_reason, generated.response) == (True, "load", "")
    assert [line.done_reason for line in client.chat("tiny", [], stream=True)] == ["load"]
    assert not engine.bodies
    with pytest.raises(ollama.ResponseError, match="other"):
        client.generate("other")


def test_names_with_a_tag(client: ollama.Client, engine: ScriptedEngine) -> None:
    assert client.chat("tiny:latest", HI).model == "tiny:latest"
    assert client.show("tiny:latest").details is not None
    engine.cards = [card(), card("tiny:latest")]
    client.chat("tiny:latest", HI)
    assert [body.model for body in engine.bodies] == ["tiny", "tiny:latest"]
    with pytest.raises(ollama.ResponseError, match="tiny") as raised:
        client.chat("tiny:7b", HI)
    assert raised.value.status_code == 404


def test_what_clients_ask_first(client: ollama.Client, engine: ScriptedEngine) -> None:
    engine.cards = [card(template=THINKS + "{# [TOOL_CALLS] #}", parameters=1_500_000_000)]
    (listed,), (running,) = client.list().models, client.ps().models
    assert (listed.model, running.model, running.context_length) == ("tiny", "tiny", 512)
    assert listed.details == running.details
    assert listed.details is not None
    assert (listed.details.family, listed.details.parameter_size) == ("llama", "1.5B")
    shown = client.show("tiny")
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 512
    assert shown.capabilities == ["completion", "tools", "thinking"]
    with TestClient(create_app(engine)) as http:
        assert http.get("/api/version").json().keys() == {"version"}
        assert http.head("/").status_code == 200
        assert http.post("/api/show", json={"name": "tiny"}).status_code == 200


def test_models_that_sleep_are_not_in_memory(client: ollama.Client, engine: ScriptedEngine) -> None:
    asleep = WeightLoad(awake=False, blocks=0, wakes_total=0, wake_seconds=0.0)

    async def loads_of_sleepers() -> dict[str, UnitLoad]:
        return {"unit-0": loads.unit(loads.model(1, weights=asleep), names=["tiny"])}

    engine.cards = [card(), card("other")]
    engine.loads = loads_of_sleepers  # type: ignore[method-assign]
    assert [one.model for one in client.ps().models] == ["other"]
    engine.away = True
    del engine.loads
    assert [one.model for one in client.ps().models] == ["tiny", "other"]


def test_errors_are_ollama_s(client: ollama.Client, engine: ScriptedEngine) -> None:
    with pytest.raises(ollama.ResponseError, match="maximum context length is 512") as raised:
        client.chat("tiny", HI, options={"num_predict": 600})
    assert raised.value.status_code == 400
    engine.error = QueueFull("the queue is full", retry_after=7)
    with pytest.raises(ollama.ResponseError, match="the queue is full") as raised:
        list(client.chat("tiny", HI, stream=True))
    assert raised.value.status_code == 429
    engine.error, engine.break_after, engine.break_with = None, 2, Unavailable("away")
    with pytest.raises(ollama.ResponseError, match="away"):
        list(client.chat("tiny", HI, stream=True))
    with pytest.raises(ollama.ResponseError, match="config") as raised:
        client.pull("tiny")
    assert raised.value.status_code == 501
    with pytest.raises(ollama.ResponseError, match="config") as raised:
        client.delete("tiny")
    assert raised.value.status_code == 501


@pytest.mark.parametrize(
    ("path", "more", "said"),
    [
        ("chat", {"messages": [{"role": "user", "content": "hi", "images": ["aGk="]}]}, "images"),
        ("chat", {"messages": [*HI, {"role": "assistant", "content": "I"}]}, "cannot be the assistant's"),
        ("chat", {"options": {"num_ctx": 513}}, "options.num_ctx"),
        ("chat", {"options": {"temperature": 3}}, "options.temperature"),
        ("chat", {"options": {"mirostat": 1}}, "options.mirostat"),
        ("chat", {"format": "xml"}, "format"),
        ("chat", {"logprobs": True}, "logprobs"),
        ("generate", {"suffix": "x"}, "suffix"),
        ("generate", {"template": "x"}, "template"),
        ("generate", {"context": [1]}, "context"),
        ("generate", {"images": ["aGk="]}, "images"),
        ("generate", {"raw": True, "system": "x"}, "system"),
        ("show", {"model": None}, "model"),
        ("nothing", {}, "no such path"),
    ],
)
def test_what_is_wrong_is_told(engine: ScriptedEngine, path: str, more: Any, said: str) -> None:
    with TestClient(create_app(engine)) as http:
        answer = http.post(f"/api/{path}", json={"model": "tiny", "prompt": "x", "messages": HI} | more)
    assert answer.status_code == (404 if path == "nothing" else 400)
    assert said in OllamaError.model_validate(answer.json()).error
    assert not engine.bodies


def test_keys(engine: ScriptedEngine) -> None:
    with serving(create_app(engine, keys=Keys(api={"alpha": None}))) as url:
        ollama.Client(url, headers={"authorization": "Bearer alpha"}).chat("tiny", HI)
        with pytest.raises(ollama.ResponseError, match="API key") as raised:
            ollama.Client(url, headers={}).list()
    assert raised.value.status_code == 401
