"""Thoughts have a field of their own in each face, whether the model or its template begins them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from kvloom.api.app import create_app
from tests.api.scripted import TEMPLATE, ScriptedEngine, card, says, serving, tokens

HI: list[Any] = [{"role": "user", "content": "hi"}]
THINKS = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
OPENS = TEMPLATE + "<think>\n{# </think> #}"
SHOWS = "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}</think>"
SAID = "<think>\n1 < 2\n</think>\n\nYes."
TOOL: Any = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALLS = "{# <tool_call> #}"


@pytest.fixture
def engine() -> ScriptedEngine:
    cards = [card(template=THINKS), card("opens", OPENS), card("shows", SHOWS), card("plain")]
    cards += [card("calls", THINKS + CALLS)]
    return ScriptedEngine(says(SAID), cards=cards)


@pytest.fixture
def url(engine: ScriptedEngine) -> Iterator[str]:
    with serving(create_app(engine)) as url:
        yield url


@pytest.fixture
def chats(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0)


def streamed(chats: openai.OpenAI, **asked: Any) -> tuple[str, str]:
    """The thoughts and the text of a stream."""
    deltas = [
        one.choices[0].delta for one in chats.chat.completions.create(messages=HI, stream=True, **asked)
    ]
    thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    return thoughts, "".join(delta.content or "" for delta in deltas)


@pytest.mark.parametrize(("model", "said"), [("tiny", SAID), ("opens", SAID.removeprefix("<think>"))])
def test_a_chat(chats: openai.OpenAI, engine: ScriptedEngine, model: str, said: str) -> None:
    engine.script = says(said)
    message = chats.chat.completions.create(model=model, messages=HI).choices[0].message
    assert (getattr(message, "reasoning_content", None), message.content) == ("1 < 2", "Yes.")
    assert streamed(chats, model=model) == ("1 < 2", "Yes.")
    assert streamed(chats, model=model, logprobs=True) == ("1 < 2", "Yes.")
    resumable = {"include_usage": True, "include_event_ids": True}
    events = chats.chat.completions.create(
        model=model, messages=HI, stream=True, extra_body={"stream_options": resumable}
    )
    assert "".join(one.choices[0].delta.content or "" for one in events if one.choices) == "Yes."


def test_a_model_without_thoughts_says_what_it_says(chats: openai.OpenAI) -> None:
    message = chats.chat.completions.create(model="plain", messages=HI).choices[0].message
    assert message.content == SAID
    with pytest.raises(openai.BadRequestError, match="has no thoughts"):
        chats.chat.completions.create(model="plain", messages=HI, reasoning_effort="high")
    chats.chat.completions.create(model="plain", messages=HI, reasoning_effort="none")


def test_a_grammar_leaves_no_room_for_thoughts(chats: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = says("{}")
    answer = chats.chat.completions.create(
        model="opens", messages=HI, response_format={"type": "json_object"}
    )
    assert answer.choices[0].message.content == "{}"


def test_switches_reach_the_template(chats: openai.OpenAI, engine: ScriptedEngine) -> None:
    for more in ({"reasoning_effort": "none"}, {"reasoning_effort": "low"}):
        chats.chat.completions.create(model="tiny", messages=HI, **more)  # type: ignore[call-overload]
    off, on = (body.prompt for body in engine.bodies)
    assert off == on + tokens("<think></think>")


def test_past_thoughts_reach_the_template(chats: openai.OpenAI, engine: ScriptedEngine) -> None:
    past: Any = {"role": "assistant", "content": "Yes.", "reasoning_content": "1 < 2"}
    chats.chat.completions.create(model="shows", messages=[past, *HI], max_tokens=1)
    assert engine.bodies[0].prompt == tokens("1 < 2</think>")


def test_thoughts_come_before_calls(chats: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = says(
        '<think>Sum.</think>See <tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'
    )
    answer = chats.chat.completions.create(
        model="calls",
        messages=HI,
        tools=[{"type": "function", "function": TOOL}],
    )
    message = answer.choices[0].message
    assert (getattr(message, "reasoning_content", None), message.content) == ("Sum.", "See")
    (call,) = message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"a": 3}


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_has_them_in_blocks(url: str, engine: ScriptedEngine, stream: bool) -> None:
    engine.script = says(
        '<think>Sum.</think>A <tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call> B '
        '<tool_call>{"name": "add", "arguments": {"a": 4}}</tool_call>'
    )
    tool = {"name": "add", "input_schema": TOOL["parameters"]}
    asked: dict[str, Any] = {"model": "calls", "max_tokens": 300, "messages": HI, "tools": [tool]}
    with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as client:
        if stream:
            with client.messages.stream(**asked) as events:
                told = events.get_final_message()
        else:
            told = client.messages.create(**asked)
        blocks = [block.model_dump(include={"thinking", "text", "input"}) for block in told.content]
        assert blocks == [
            {"thinking": "Sum."},
            {"text": "A"},
            {"input": {"a": 3}},
            {"text": " B"},
            {"input": {"a": 4}},
        ]
        past = [*HI, {"role": "assistant", "content": [told.content[0], told.content[1]]}, *HI]
        client.messages.create(model="shows", max_tokens=1, messages=past)
        assert engine.bodies[-1].prompt == tokens("Sum.</think>")


def test_arguments_join_text_in_a_template(chats: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.cards.append(card("joins", "{{ '>' + messages[0].tool_calls[0].function.arguments + '<' }}"))
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a":3}'}}
    past: Any = {"role": "assistant", "content": None, "tool_calls": [call]}
    chats.chat.completions.create(model="joins", messages=[past, *HI], max_tokens=1)
    assert engine.bodies[-1].prompt == tokens('>{"a": 3}<')
