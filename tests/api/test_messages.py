"""Anthropic's Messages by its official client: the same prompt and the same tokens as a chat of OpenAI's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from starlette.testclient import TestClient

from kvloom.api.app import create_app
from kvloom.api.auth import Keys
from kvloom.api.schemas.messages import MessagesError
from kvloom.types.errors import QueueFull, Unavailable
from tests.api.scripted import ScriptedEngine, card, says, serving, token, tokens

TEXT = "hello world, naïve 🦊 fox"
HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {"name": "weather", "input_schema": {"type": "object", "properties": {}}}
CALL = 'See. [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Zürich"}}]'


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(says(TEXT))


@pytest.fixture
def client(engine: ScriptedEngine) -> Iterator[anthropic.Anthropic]:
    with (
        serving(create_app(engine)) as url,
        anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as made,
    ):
        yield made


def test_a_message(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    told = client.messages.create(model="tiny", max_tokens=99, system="be brief", messages=HI)
    assert [block.model_dump(include={"type", "text"}) for block in told.content] == [
        {"type": "text", "text": TEXT}
    ]
    assert (told.role, told.model) == ("assistant", "tiny")
    assert (told.stop_reason, told.stop_sequence) == ("end_turn", None)
    (body,) = engine.bodies
    assert body.prompt == tokens("<s><|system|>be brief\n<|user|>hi\n<|assistant|>")
    assert body.sampling.max_tokens == 99
    cached = told.usage.cache_read_input_tokens or 0
    assert told.usage.input_tokens + cached == len(body.prompt)
    assert told.usage.output_tokens == len(tokens(TEXT)) + 1


def test_a_stream_is_the_same_message(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="tiny", max_tokens=99, messages=HI) as stream:
        assert "".join(stream.text_stream) == TEXT
        told = stream.get_final_message()
    whole = client.messages.create(model="tiny", max_tokens=99, messages=HI)
    dumped = [[block.model_dump(exclude_none=True) for block in one.content] for one in (told, whole)]
    assert dumped[0] == dumped[1]
    assert (told.stop_reason, told.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_why_it_ended(client: anthropic.Anthropic, stream: bool) -> None:
    def ended(**more: Any) -> tuple[Any, Any]:
        asked: dict[str, Any] = {"model": "tiny", "messages": HI, "max_tokens": 99} | more
        if not stream:
            told = client.messages.create(**asked)
        else:
            with client.messages.stream(**asked) as events:
                told = events.get_final_message()
        return told.stop_reason, told.stop_sequence

    assert ended(max_tokens=2) == ("max_tokens", None)
    assert ended(stop_sequences=["never", "world"]) == ("stop_sequence", "world")


@pytest.mark.parametrize("stream", [False, True])
def test_tools(client: anthropic.Anthropic, engine: ScriptedEngine, stream: bool) -> None:
    engine.script = lambda *_: [*tokens("See. "), token("[TOOL_CALLS]"), *tokens(CALL.partition("] ")[2])]
    engine.cards = [card(template=(card().chat_template or "") + "{# [TOOL_CALLS] #}")]
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 99, "messages": HI, "tools": [TOOL]}
    if stream:
        with client.messages.stream(**asked) as events:
            told = events.get_final_message()
    else:
        told = client.messages.create(**asked)
    said, call = told.content
    assert (said.type, call.type, told.stop_reason) == ("text", "tool_use", "tool_use")
    assert said.type == "text"
    assert said.text == "See."
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("weather", {"city": "Zürich"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    more = [*HI, {"role": "assistant", "content": told.content}, {"role": "user", "content": [result]}]
    client.messages.create(model="tiny", max_tokens=1, messages=more)
    assert b"<|tool|>rain" in _text(engine)


def test_a_turn_keeps_the_order_of_its_blocks(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    calls: list[Any] = [{"type": "tool_use", "id": one, "name": "weather", "input": {}} for one in ("a", "b")]
    results = [
        {"type": "tool_result", "tool_use_id": one, "content": said}
        for one, said in (("a", "rain"), ("b", "sun"))
    ]
    before, between, after = ({"type": "text", "text": said} for said in ("one", "two", "three"))
    turn = [before, results[0], between, results[1], after]
    messages: list[Any] = [*HI, {"role": "assistant", "content": calls}, {"role": "user", "content": turn}]
    client.messages.create(model="tiny", max_tokens=1, messages=messages)
    told = _text(engine)
    assert b"<|user|>one\\n<|tool|>rain\\n<|user|>two\\n<|tool|>sun\\n<|user|>three\\n<|assistant|>" in told


def _text(engine: ScriptedEngine) -> bytes:
    with TestClient(create_app(engine)) as http:
        return http.post("/detokenize", json={"tokens": engine.bodies[-1].prompt}).content


def test_the_same_tokens_as_a_chat(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    turns = [*HI, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "hello <s> world"}]
    drawn = {"temperature": 0.5, "top_k": 3, "top_p": 0.9}
    client.messages.create(model="tiny", max_tokens=7, messages=turns, extra_body=drawn)
    with TestClient(create_app(engine)) as http:
        chat = {"model": "tiny", "messages": turns, "max_tokens": 7} | drawn
        http.post("/v1/chat/completions", json=chat).raise_for_status()
    one, other = engine.bodies
    assert one.prompt == other.prompt
    for name in ("max_tokens", "temperature", "top_k", "top_p", "stop_token_ids"):
        assert getattr(one.sampling, name) == getattr(other.sampling, name)
    count = client.messages.count_tokens(model="tiny", messages=turns)
    assert count.input_tokens == len(one.prompt)


def test_more_tokens_than_there_is_room_for_may_be_asked_for(
    client: anthropic.Anthropic, engine: ScriptedEngine
) -> None:
    engine.script = lambda body, _: [token("a")] * (body.sampling.max_tokens + 1)
    patient = client.with_options(timeout=60)  # without one it refuses to ask for so much
    told = patient.messages.create(model="tiny", max_tokens=32_000, messages=HI)
    (body,) = engine.bodies
    assert told.usage.output_tokens == body.sampling.max_tokens == 512 - len(body.prompt)
    assert told.stop_reason == "model_context_window_exceeded"


def test_an_agent_s_instructions_join_the_user_s_turn(
    client: anthropic.Anthropic, engine: ScriptedEngine
) -> None:
    turns: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "one"}]}]
    turns += [{"role": "system", "content": "two"}, {"role": "user", "content": "three"}]
    more = {"context_management": {"edits": []}, "output_config": {"effort": "high"}}
    client.messages.create(
        model="tiny", max_tokens=9, messages=turns, thinking={"type": "adaptive"}, extra_body=more
    )
    assert engine.bodies[0].prompt == tokens("<s><|user|>one\ntwo\nthree\n<|assistant|>")


def test_more_than_the_context_can_be_counted(client: anthropic.Anthropic) -> None:
    long = [{"role": "user", "content": "a" * 9000}]
    assert client.messages.count_tokens(model="tiny", messages=long).input_tokens > 512  # type: ignore[arg-type]


def test_an_answer_names_its_request_as_anthropic_s_do(client: anthropic.Anthropic) -> None:
    told = client.messages.with_raw_response.create(model="tiny", max_tokens=9, messages=HI)
    assert told.request_id == told.headers["x-request-id"]


def test_errors_are_anthropic_s(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": HI}
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        client.messages.create(**asked | {"model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="maximum context length is 512"):
        client.messages.create(**asked | {"messages": [{"role": "user", "content": "a" * 600}]})
    engine.error = QueueFull("the queue is full", retry_after=7)
    with pytest.raises(anthropic.RateLimitError, match="rate_limit_error"):
        client.messages.create(**asked)
    engine.error, engine.break_after, engine.break_with = None, 2, Unavailable("away")
    with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
        list(client.messages.create(**asked, stream=True))


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://example.org/a.png"}}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'image' are not served"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text"),
        ({"messages": [*HI, {"role": "assistant", "content": "I"}]}, "end with one"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "not in tools"),
        ({"tool_choice": {"type": "tool"}}, "a tool's name"),
    ],
)
def test_what_is_wrong_is_told(engine: ScriptedEngine, more: dict[str, Any], said: str) -> None:
    with TestClient(create_app(engine)) as http:
        answer = http.post("/v1/messages", json={"model": "tiny", "max_tokens": 9, "messages": HI} | more)
    assert answer.status_code == 400
    told = MessagesError.model_validate(answer.json()).error
    assert told.type == "invalid_request_error"
    assert said in told.message
    assert not engine.bodies


def test_its_clients_send_their_key_in_a_header_of_their_own(engine: ScriptedEngine) -> None:
    app = create_app(engine, keys=Keys(api={"alpha": None}))
    with serving(app) as url:
        for key, right in (("alpha", True), ("beta", False)):
            with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
                if right:
                    client.messages.create(model="tiny", max_tokens=9, messages=HI)
                else:
                    with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
                        client.messages.create(model="tiny", max_tokens=9, messages=HI)
