"""Coding agents: a turn in the shape in which each sends it, a tool's call read from its stream, and the turn
that brings the tool's result. The words are ours; the fields, headers and their order are the agents'."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.testclient import TestClient

from kvloom.api.app import create_app
from kvloom.types.request import StartGenerate
from tests.api.scripted import TEMPLATE, ScriptedEngine, byte_level, card, tokens

ASKED = "What does hello.py print?"
RESULT = "tool-42"
FINAL = "It prints hello."
ARGUMENTS: dict[str, Any] = {"command": "cat hello.py", "timeout": 20}
HERMES = TEMPLATE + "{# <tool_call> #}"
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "what to run"},
        "timeout": {"type": "number"},
        "mode": {"anyOf": [{"const": "quiet"}, {"type": "null"}]},
    },
    "required": ["command"],
    "additionalProperties": False,
}
CACHED = {"cache_control": {"type": "ephemeral"}}


def plays(body: StartGenerate, _: int) -> list[int]:
    """Calls the tool `run`, and ends once it has the result."""
    asked: str = byte_level().decode(body.prompt, skip_special_tokens=False)
    if RESULT in asked:
        return tokens(FINAL)
    call = json.dumps({"name": "run", "arguments": ARGUMENTS})
    return tokens(f"Let me look.\n<tool_call>\n{call}\n</tool_call>")


@dataclass
class Told:
    """What an agent makes of a stream. calls: id, name and arguments of each."""

    text: str
    calls: list[tuple[str, str, Any]]
    reason: str


def events(body: str) -> Iterator[tuple[str, Any]]:
    """The name, if there is one, and the data of each event."""
    for block in body.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        if fields["data"] != "[DONE]":
            yield fields.get("event", ""), json.loads(fields["data"])


def of_chat(body: str) -> Told:
    """As the AI SDK and OpenAI's client read chunks: a call's id and name come once, usage last of all."""
    assert body.endswith("data: [DONE]\n\n")
    told, parts = Told("", [], ""), list[str]()
    *chunks, last = [data for _, data in events(body)]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        told.text += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls") or []:
            if "id" in call:
                assert call["index"] == len(told.calls)
                told.calls.append((call["id"], call["function"]["name"], None))
                parts.append("")
            parts[call["index"]] += call["function"].get("arguments", "")
        told.reason = choice["finish_reason"] or told.reason
    if last["choices"]:  # an agent that does not ask for usage
        told.reason = last["choices"][0]["finish_reason"]
    else:
        assert last["usage"]["total_tokens"] > last["usage"]["completion_tokens"] > 0
    told.calls = [(*call[:2], json.loads(part)) for call, part in zip(told.calls, parts, strict=True)]
    return told


def of_responses(body: str) -> Told:
    """As Codex reads them: items by `response.output_item.done`, usage by `response.completed`."""
    seen = [*events(body)]
    assert [data["sequence_number"] for _, data in seen] == [*range(len(seen))]
    assert all(name == data["type"] for name, data in seen)
    assert seen[0][0] == "response.created"
    assert seen[-1][0] == "response.completed"
    assert seen[-1][1]["response"]["usage"]["output_tokens"] > 0
    told, open_items = Told("", [], "completed"), list[int]()
    for name, data in seen:
        if name == "response.output_item.added":
            open_items.append(data["output_index"])
        if name == "response.output_item.done":
            assert open_items.pop() == data["output_index"]
            item = data["item"]
            if item["type"] == "message":
                told.text += "".join(part["text"] for part in item["content"])
            else:
                told.calls.append((item["call_id"], item["name"], json.loads(item["arguments"])))
    return told


def of_messages(body: str) -> Told:
    """As Claude Code reads them: blocks between their start and their stop, and why it ended."""
    seen = [*events(body)]
    assert all(name == data["type"] for name, data in seen)
    assert [seen[0][0], seen[-2][0], seen[-1][0]] == ["message_start", "message_delta", "message_stop"]
    assert seen[0][1]["message"]["usage"]["input_tokens"] > 0
    told, part = Told("", [], seen[-2][1]["delta"]["stop_reason"]), ""
    for name, data in seen[1:-2]:
        match name:
            case "content_block_start":
                block, part = data["content_block"], ""
            case "content_block_delta":
                part += data["delta"].get("text") or data["delta"].get("partial_json") or ""
            case "content_block_stop" if block["type"] == "text":
                told.text += part
            case "content_block_stop":
                told.calls.append((block["id"], block["name"], json.loads(part)))
    return told


@dataclass(frozen=True)
class Agent:
    """body: of its first request; history: where that has the conversation; said: what it adds there of an
    answer, and of the result of its tool."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    history: str
    read: Callable[[str], Told]
    said: Callable[[Told], list[dict[str, Any]]]


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "runs it", "parameters": SCHEMA}}


def chat_turn(told: Told, **more: Any) -> list[dict[str, Any]]:
    (number, name, arguments) = told.calls[0]
    written = {"name": name, "arguments": json.dumps(arguments, separators=(",", ":"))}
    called = {"id": number, "type": "function", "function": written}
    return [
        {"role": "assistant", "content": told.text, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": number, "content": RESULT} | more,
    ]


def responses_turn(told: Told) -> list[dict[str, Any]]:
    (number, name, arguments) = told.calls[0]
    text = [{"type": "output_text", "text": told.text}]
    kept = {"status": "completed", "id": "fc_of_before", "name": name, "arguments": json.dumps(arguments)}
    output = {"type": "function_call_output", "id": "fco_of_before", "call_id": number, "output": RESULT}
    return [
        {"type": "message", "status": "completed", "id": "msg_1", "role": "assistant", "content": text},
        {"type": "function_call", **kept, "call_id": number},
        output,
    ]


def messages_turn(told: Told) -> list[dict[str, Any]]:
    (number, name, arguments) = told.calls[0]
    used = {"type": "tool_use", "id": number, "name": name, "input": arguments}
    result = {"tool_use_id": number, "type": "tool_result", "content": RESULT, "is_error": False}
    return [
        {"role": "assistant", "content": [{"type": "text", "text": told.text}, used]},
        {"role": "user", "content": [result | CACHED]},
    ]


SYSTEM = {"role": "system", "content": "You are an agent."}
ONE = {"role": "user", "content": ASKED}
TEXTS = {"role": "user", "content": [{"type": "text", "text": ASKED}]}
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
CHAT = "/v1/chat/completions"
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
CODEX_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "run", "description": "runs it", "strict": False, "parameters": SCHEMA},
    {"type": "namespace", "name": "helpers", "description": "others", "tools": []},
    {"type": "web_search", "external_web_access": True, "search_content_types": ["text", "image"]},
]
CODEX_NAMED_TOOLS: list[dict[str, Any]] = [
    {"type": "custom", "name": "patch", "description": "edits", "format": {"type": "grammar"}},
    {"type": "tool_search", "execution": "client", "description": "finds tools", "parameters": NOTHING},
]
CODEX_BODY: dict[str, Any] = {
    "model": "tiny",
    "stream": True,
    "instructions": "You are an agent.",
    "input": [
        {"type": "message", "id": "msg_a", "role": "developer",
         "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "id": "msg_b", "role": "user",
         "content": [{"type": "input_text", "text": ASKED}]},
    ],
    "tools": CODEX_TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "019a",
    "client_metadata": {"session_id": "019a", "x-codex-turn-metadata": "{}"},
}  # fmt: skip
CODEX_HEADERS = {"accept": "text/event-stream", "session-id": "019a", "thread-id": "019a",
                 "x-codex-beta-features": "remote_compaction_v2"}  # fmt: skip
CLAUDE_BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Today is a Monday."},
                                     {"type": "text", "text": ASKED, **CACHED}]},
        {"role": "system", "content": "There are skills."},
    ],
    "system": [{"type": "text", "text": "billing: none"},
               {"type": "text", "text": "You are an agent.", **CACHED}],
    "tools": [{"name": "run", "description": "runs it", "input_schema": SCHEMA}],
    "metadata": {"user_id": '{"device_id":"1","account_uuid":"","session_id":"2"}'},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}  # fmt: skip
CLAUDE_HEADERS = {
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,effort-2025-11-24",
    "anthropic-version": "2023-06-01",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-api-key": "x",
    "x-app": "cli",
}


def chat_agent(*messages: dict[str, Any], said: Callable[[Told], Any] = chat_turn, **more: Any) -> Agent:
    body = {"model": "tiny", "messages": list(messages), "tools": [function("run")]} | more
    return Agent(CHAT, {"authorization": "Bearer x"}, body, "messages", of_chat, said)


AGENTS = {
    "Claude Code": Agent(
        "/v1/messages?beta=true", CLAUDE_HEADERS, CLAUDE_BODY, "messages", of_messages, messages_turn
    ),
    "Claude Code, a model of known name": Agent(
        "/v1/messages?beta=true", CLAUDE_HEADERS,
        {name: value for name, value in CLAUDE_BODY.items() if name != "output_config"}
        | {"thinking": {"budget_tokens": 31999, "type": "enabled"}},
        "messages", of_messages, messages_turn,
    ),
    "Codex": Agent("/v1/responses", CODEX_HEADERS, CODEX_BODY, "input", of_responses, responses_turn),
    "Codex, a model of known name": Agent(
        "/v1/responses", CODEX_HEADERS,
        CODEX_BODY | {"tools": CODEX_TOOLS + CODEX_NAMED_TOOLS, "text": {"verbosity": "low"}},
        "input", of_responses, responses_turn,
    ),
    "opencode": chat_agent(SYSTEM, ONE, max_tokens=4096, tool_choice="auto", **USAGE),
    "opencode, by Responses": Agent(
        "/v1/responses", {"authorization": "Bearer x"},
        {"model": "tiny", "input": [{"role": "system", "content": "You are an agent."},
                                    {"role": "user", "content": [{"type": "input_text", "text": ASKED}]}],
         "max_output_tokens": 4096, "store": False, "prompt_cache_key": "ses_1", "tools": CODEX_TOOLS[:1],
         "tool_choice": "auto", "stream": True},
        "input", of_responses,
        lambda told: [{"role": "assistant", "content": [{"type": "output_text", "text": told.text}]},
                      {"type": "function_call", "call_id": told.calls[0][0], "name": "run",
                       "arguments": "{}"},
                      {"type": "function_call_output", "call_id": told.calls[0][0], "output": RESULT}],
    ),
    "qwen-code": chat_agent(
        SYSTEM, {"role": "user", "content": [{"type": "text", "text": "Linux."}]},
        {"role": "assistant", "content": "Got it."}, TEXTS,
        said=lambda told: chat_turn(told, content=[{"type": "text", "text": RESULT}]),
        max_tokens=8000, **USAGE,
    ),
    "Cline": chat_agent(SYSTEM, ONE, tool_choice="auto", **USAGE),
}  # fmt: skip


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(plays, cards=[card(template=HERMES, context_length=16384)])


@pytest.fixture
def http(engine: ScriptedEngine) -> Iterator[TestClient]:
    with TestClient(create_app(engine)) as http:
        yield http


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_s_tool_is_called_and_its_result_is_read(
    http: TestClient, engine: ScriptedEngine, name: str
) -> None:
    agent = AGENTS[name]

    def answer(body: dict[str, Any]) -> Told:
        answered = http.post(agent.path, json=body, headers=agent.headers)
        assert answered.status_code == 200, answered.text
        return agent.read(answered.text)

    called = answer(agent.body)
    assert called.text.strip() == "Let me look."
    ((number, tool, arguments),) = called.calls
    assert number
    assert (tool, arguments) == ("run", ARGUMENTS)
    assert called.reason in ("tool_calls", "tool_use", "completed")
    ended = answer(agent.body | {agent.history: agent.body[agent.history] + agent.said(called)})
    assert (ended.text, ended.calls) == (FINAL, [])
    assert ended.reason in ("stop", "end_turn", "completed")
    first, second = (byte_level().decode(one.prompt, skip_special_tokens=False) for one in engine.bodies)
    assert all(text in first for text in ("You are an agent.", ASKED))
    assert all(text in second for text in ("You are an agent.", ASKED, RESULT))


def test_aider_asks_without_tools(http: TestClient, engine: ScriptedEngine) -> None:
    """It writes edits as text, and sends examples as turns before the question."""
    engine.script = lambda *_: tokens(FINAL)
    examples = [{"role": "user", "content": "Greet."}, {"role": "assistant", "content": "Ok."}]
    body = {"messages": [SYSTEM, *examples, ONE], "model": "tiny", "stream": True, "temperature": 0}
    told = of_chat(http.post(CHAT, json=body, headers={"authorization": "Bearer x"}).text)
    assert (told.text, told.calls, told.reason) == (FINAL, [], "stop")


def test_verbosity_is_a_switch_of_the_template(http: TestClient, engine: ScriptedEngine) -> None:
    engine.cards = [card(template=TEMPLATE + "{{ verbosity }}")]
    engine.script = lambda *_: tokens(FINAL)
    http.post(CHAT, json={"model": "tiny", "messages": [ONE], "verbosity": "low"}).raise_for_status()
    asked = {"model": "tiny", "input": ASKED, "text": {"verbosity": "high"}}
    told = http.post("/v1/responses", json=asked).raise_for_status().json()
    assert told["text"] == {"format": {"type": "text"}, "verbosity": "high"}
    ends = [byte_level().decode(body.prompt)[-4:] for body in engine.bodies]
    assert ends == ["\nlow", "high"]


def test_a_forced_tool_goes_before_a_format(http: TestClient, engine: ScriptedEngine) -> None:
    """instructor sends both to /v1/responses: the call has no text that a format could hold for."""
    form = {"type": "json_schema", "name": "run", "schema": SCHEMA}
    asked = {"model": "tiny", "input": ASKED, "tools": CODEX_TOOLS[:1]}
    forced = {"tool_choice": {"type": "function", "name": "run"}}
    http.post("/v1/responses", json=asked | forced).raise_for_status()
    http.post("/v1/responses", json=asked | forced | {"text": {"format": form}}).raise_for_status()
    alone, both = (body.sampling.guide for body in engine.bodies)
    assert alone == both
    assert alone is not None
    refused = {"messages": [ONE], "tools": [function("run")], "tool_choice": "required", "guided_regex": "a"}
    assert "exclude each other" in http.post(CHAT, json={"model": "tiny"} | refused).text


def test_a_benchmark_goes_on_behind_the_stop_token(http: TestClient, engine: ScriptedEngine) -> None:
    """GuideLLM sends `ignore_eos` to /v1/responses too, so that all answers are equally long."""
    asked = {"model": "tiny", "input": ASKED, "max_output_tokens": 9, "ignore_eos": True}
    http.post("/v1/responses", json=asked).raise_for_status()
    (body,) = engine.bodies
    assert not body.sampling.stop_token_ids


def test_a_picture_out_of_a_tool_is_named(http: TestClient) -> None:
    """An agent that reads a picture is told that no picture is served, not that a field is missing."""
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [picture]}
    turns = [*CLAUDE_BODY["messages"], {"role": "user", "content": [result]}]
    answer = http.post("/v1/messages", json=CLAUDE_BODY | {"messages": turns})
    assert answer.status_code == 400
    assert "blocks of type 'image' are not served" in answer.json()["error"]["message"]
