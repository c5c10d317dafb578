"""OpenAI's Responses by its official client: the same prompt and the same tokens as a chat."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from starlette.testclient import TestClient

from kvloom.api.app import create_app
from kvloom.api.auth import Keys
from kvloom.api.openai.stored import ENTRY_BYTES, ResponseNotFound, ResponseStore, StoredResponse
from kvloom.api.schemas.generation import ErrorAnswer
from kvloom.api.schemas.responses import ResponseAnswer
from kvloom.types.errors import QueueFull, Unavailable
from tests.api.scripted import ScriptedEngine, card, says, serving, token, tokens

TEXT = "hello world, naïve 🦊 fox"
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}
CALL = ' [{"name": "weather", "arguments": {"city": "Zürich"}}]'
PROMPT = "<s><|user|>hi\n<|assistant|>"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(says(TEXT))


def answered(client: openai.OpenAI, *, stream: bool, **asked: Any) -> Any:
    """Returns the answer, of a stream or whole."""
    given: dict[str, Any] = {"model": "tiny", "input": "hi"} | asked
    if not stream:
        return client.responses.create(**given)
    with client.responses.stream(**given) as events:
        last: Any = [*events][-1]
    return last.response


def test_an_answer(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    told = client.responses.create(
        model="tiny", input="hi", instructions="be brief", max_output_tokens=99, metadata={"a": "b"}
    )
    assert told.output_text == TEXT
    assert (told.object, told.status, told.model, told.metadata) == (
        "response",
        "completed",
        "tiny",
        {"a": "b"},
    )
    assert told.instructions == "be brief"
    (body,) = engine.bodies
    assert body.prompt == tokens("<s><|system|>be brief\n<|user|>hi\n<|assistant|>")
    assert body.sampling.max_tokens == 99
    assert told.usage is not None
    assert told.usage.input_tokens == len(body.prompt)
    assert told.usage.input_tokens_details.cached_tokens == 2
    assert told.usage.output_tokens == len(tokens(TEXT)) + 1
    assert told.usage.output_tokens_details.reasoning_tokens == 0
    with TestClient(create_app(engine)) as http:
        ResponseAnswer.model_validate(
            http.post("/v1/responses", json={"model": "tiny", "input": "hi"}).json()
        )


def test_a_stream_is_the_same_answer(client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny", input="hi") as stream:
        events = list(stream)
        told = stream.get_final_response()
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type for event in events if not event.type.endswith("delta")]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == TEXT
    assert len(deltas) > 1
    assert_same(told, client.responses.create(model="tiny", input="hi"))


def assert_same(one: Any, other: Any) -> None:
    """The answers are the same but for what their own numbers are in."""
    dumped = []
    for answer in (one, other):
        shown = answer.model_dump(mode="json", exclude={"id", "created_at", "usage"})
        for item in shown["output"]:
            item.pop("id", None)
            item.pop("call_id", None)
            item.pop("parsed_arguments", None)
            for part in item.get("content") or ():
                part.pop("parsed", None)
        dumped.append(shown)
    assert dumped[0] == dumped[1]
    assert one.usage.total_tokens == other.usage.total_tokens


def test_what_was_asked_for_is_told(client: openai.OpenAI) -> None:
    large: Any = TOOL | {"parameters": {"type": "object", "properties": {"x": {"maximum": 2**80}}}}
    shape: Any = {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {}}}
    asked: dict[str, Any] = {
        "tools": [large],
        "text": {"format": shape},
        "temperature": 0.5,
        "top_p": 0.25,
        "max_output_tokens": 9,
        "parallel_tool_calls": False,
        "user": "me",
    }
    told = client.responses.create(model="tiny", input="hi", **asked).to_dict()
    assert told["tools"] == [large | {"description": None}]
    assert told["text"] == {"format": shape | {"description": None, "strict": None}}
    for name in ("temperature", "top_p", "max_output_tokens", "parallel_tool_calls", "user"):
        assert told[name] == asked[name]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_its_limit_cuts_off(client: openai.OpenAI, *, stream: bool) -> None:
    told = answered(client, stream=stream, max_output_tokens=2)
    assert (told.status, told.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in told.output] == ["incomplete"]
    assert told.usage.output_tokens == 2


def calls(engine: ScriptedEngine) -> None:
    """Has the engine call a tool after thoughts and some text."""
    engine.script = lambda *_: [*tokens("<think>so so</think>See. "), token("[TOOL_CALLS]"), *tokens(CALL)]
    marks = "{% if '</think>' in '' %}{% endif %}{# [TOOL_CALLS] #}"
    past = "{% for m in messages %}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    past += "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
    engine.cards = [card(template=past + (card().chat_template or "") + marks)]


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_and_tools(client: openai.OpenAI, engine: ScriptedEngine, *, stream: bool) -> None:
    calls(engine)
    told = answered(client, stream=stream, tools=[TOOL])
    thought, said, call = told.output
    assert (thought.type, [part.text for part in thought.content]) == ("reasoning", ["so so"])
    assert (said.type, told.output_text) == ("message", "See.")
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"city": "Zürich"}')
    assert told.usage.output_tokens_details.reasoning_tokens in range(5, told.usage.output_tokens)
    rain: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    items = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in told.output), rain]
    chat: list[Any] = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "See.",
            "reasoning_content": "so so",
            "tool_calls": [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
    ]
    references = [items[0], *({"type": "item_reference", "id": item.id} for item in told.output), rain]
    client.responses.create(model="tiny", input=items)
    client.responses.create(model="tiny", input=references)
    client.responses.create(model="tiny", input=[rain], previous_response_id=told.id)
    client.chat.completions.create(model="tiny", messages=chat)
    prompts = [body.prompt for body in engine.bodies[1:]]
    assert prompts == [prompts[-1]] * 4
    assert prompts[0][: len(tokens("(so so)Zürich"))] == tokens("(so so)Zürich")


def test_the_events_of_thoughts_and_calls(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    calls(engine)
    with client.responses.stream(model="tiny", input="hi", tools=[TOOL]) as stream:
        events: list[Any] = list(stream)
        told: Any = stream.get_final_response()
    found: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            found[event.type] = found.get(event.type, "") + getattr(event, "delta", "")
    assert found == {
        "response.reasoning_text.delta": "so so",
        "response.output_text.delta": "See.",
        "response.function_call_arguments.delta": '{"city": "Zürich"}',
    }
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    ids = [item.id for item in told.output]
    assert [item.id for item in added] == [item.id for item in done] == ids
    kept = client.responses.retrieve(told.id).output
    assert [item.to_dict() for item in done] == [item.to_dict() for item in kept]
    assert_same(told, client.responses.create(model="tiny", input="hi", tools=[TOOL]))


def test_the_same_tokens_as_a_chat(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    turns: list[Any] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "hello <s> world"},
    ]
    drawn: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "extra_body": {"top_k": 3, "seed": 4}}
    client.responses.create(model="tiny", input=turns, max_output_tokens=7, tools=[TOOL], **drawn)
    function = {name: value for name, value in TOOL.items() if name != "type"}
    tools: list[Any] = [{"type": "function", "function": function}]
    client.chat.completions.create(model="tiny", messages=turns, max_tokens=7, tools=tools, **drawn)
    one, other = engine.bodies
    assert one.prompt == other.prompt
    assert one.sampling == other.sampling


class Place(BaseModel):
    name: str
    people: int


def test_a_parsed_answer(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = says('{"name": "Ulm", "people": 130000}')
    told = client.responses.parse(model="tiny", input="hi", text_format=Place)
    assert told.output_parsed == Place(name="Ulm", people=130000)
    with client.responses.stream(model="tiny", input="hi", text_format=Place) as stream:
        assert stream.get_final_response().output_parsed == told.output_parsed
    client.chat.completions.parse(
        model="tiny", messages=[{"role": "user", "content": "hi"}], response_format=Place
    )
    guides = [body.sampling.guide for body in engine.bodies]
    assert guides[0] is not None
    assert guides[2] is not None
    assert guides[0].text == guides[2].text
    assert guides[0].param == "text.format"


@pytest.mark.parametrize("stream", [False, True])
def test_a_kept_answer(client: openai.OpenAI, engine: ScriptedEngine, *, stream: bool) -> None:
    first = answered(client, stream=stream, instructions="be brief")
    assert client.responses.retrieve(first.id).output_text == first.output_text == TEXT
    second = answered(client, stream=stream, input="more", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert engine.bodies[1].prompt == tokens(
        f"<s><|user|>hi\n<|assistant|>{TEXT}\n<|user|>more\n<|assistant|>"
    )
    texts = [
        [part.text for part in item.content]  # type: ignore[union-attr]
        for item in client.responses.input_items.list(second.id, order="asc")
    ]
    assert texts == [["hi"], [TEXT], ["more"]]
    page = client.responses.input_items.list(second.id, limit=2)
    assert page.has_more
    assert len(list(page)) == 3  # with those of the next page
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=f"Response with id '{first.id}' not found"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input="x", previous_response_id=first.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    answered(client, stream=stream, input="more", previous_response_id=second.id)
    assert engine.bodies[-1].prompt[: len(engine.bodies[1].prompt)] == engine.bodies[1].prompt


def test_what_is_not_to_be_kept_is_not(client: openai.OpenAI) -> None:
    told: Any = client.responses.create(model="tiny", input="hi", store=False)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            ask(told.id)
    with pytest.raises(openai.NotFoundError, match="Item with id"):
        client.responses.create(model="tiny", input=[{"type": "item_reference", "id": told.output[0].id}])


def test_nobody_reads_the_answers_of_another_key(engine: ScriptedEngine) -> None:
    with serving(create_app(engine, keys=Keys(api={"alpha": None, "beta": None}))) as url:
        alpha, beta = (
            openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) for key in ("alpha", "beta")
        )
        with alpha, beta:
            told = alpha.responses.create(model="tiny", input="hi")
            with pytest.raises(openai.NotFoundError):
                beta.responses.retrieve(told.id)
            with pytest.raises(openai.NotFoundError):
                beta.responses.delete(told.id)
            with pytest.raises(openai.BadRequestError, match="Previous response with id"):
                beta.responses.create(model="tiny", input="x", previous_response_id=told.id)
            assert alpha.responses.retrieve(told.id).output_text == TEXT


def test_errors_are_openai_s(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    with pytest.raises(openai.NotFoundError, match="`other` does not exist"):
        client.responses.create(model="other", input="hi")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512") as caught:
        client.responses.create(model="tiny", input="hi", max_output_tokens=600)
    assert caught.value.param == "max_output_tokens"
    with pytest.raises(openai.BadRequestError, match=r"reasoning\.effort: the chat template") as caught:
        client.responses.create(model="tiny", input="hi", reasoning={"effort": "low"})
    assert caught.value.param == "reasoning.effort"
    engine.error = QueueFull("the queue is full", retry_after=7)
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError):
            client.responses.create(model="tiny", input="hi", stream=stream)


def test_a_stream_that_breaks_off_has_failed(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.break_after, engine.break_with = 3, Unavailable("away")
    with client.responses.stream(model="tiny", input="hi") as stream:
        events: list[Any] = [*stream]
    last = events.pop()
    assert last.type == "response.failed"
    assert last.sequence_number == len(events)
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "away")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(last.response.id)


def _said(part: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"input": [{"role": role, "content": [part]}]}


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"input": None}, "input", "needed"),
        ({"input": []}, "input", "needed"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"temperature": 3}, "temperature", "less"),
        (_said({"type": "input_image", "image_url": "x"}), "input[0].content[0]", "'input_image' are not"),
        (_said({"type": "input_text"}), "input[0].content[0]", "needs its text"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "user"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0]", "'computer_call' are not served"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id", "required"),
        ({"tools": [{"type": "file_search"}]}, "tools[0]", "'file_search' are not served"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "not in tools"),
        ({"background": True}, "background", "while the client waits"),
        ({"truncation": "auto"}, "truncation", "not cut short"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"include": ["message.output_text.logprobs"]}, "include", "not served"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "required"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "'low', 'medium' or 'high'"),
    ],
)
def test_what_is_wrong_is_told(engine: ScriptedEngine, more: dict[str, Any], param: str, said: str) -> None:
    with TestClient(create_app(engine)) as http:
        answer = http.post("/v1/responses", json={"model": "tiny", "input": "hi"} | more)
    assert answer.status_code == 400
    told = ErrorAnswer.model_validate(answer.json()).error
    assert (told.type, told.param) == ("invalid_request_error", param)
    assert said in told.message
    assert not engine.bodies


def test_half_a_character_is_no_text(engine: ScriptedEngine) -> None:
    with TestClient(create_app(engine)) as http:
        for field in ("input", "instructions", "user"):
            raw = json.dumps({"model": "tiny", "input": "hi"} | {field: "\ud800"})
            assert http.post("/v1/responses", content=raw).status_code == 400


def test_what_asks_for_what_is_done_anyway_passes(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.responses.create(
        model="tiny",
        input="hi",
        background=False,
        truncation="disabled",
        tool_choice="auto",
        include=["reasoning.encrypted_content"],
        prompt_cache_key="x",
        extra_body={"something_new": 1},
    )
    assert engine.bodies[0].prompt == tokens(PROMPT)


def stored(
    name: str, tenant: str = "a", before: StoredResponse | None = None, size: int = 0
) -> StoredResponse:
    return StoredResponse(name, tenant, before, b"x" * size, b"")


def names(store: ResponseStore, *asked: str, tenant: str = "a") -> list[str]:
    return [name for name in asked if store.find(tenant, name)]


def test_the_oldest_answers_go_first() -> None:
    store = ResponseStore(most=3)
    for name in ("1", "2", "3", "4"):
        store.keep(stored(name))
    assert names(store, "1", "2", "3", "4") == ["2", "3", "4"]
    with pytest.raises(ResponseNotFound):
        store.get("a", "1")


def test_bytes_are_bounded_and_a_conversation_is_held_once() -> None:
    store = ResponseStore(most_bytes=4 * ENTRY_BYTES)
    first = stored("1", size=ENTRY_BYTES)
    second = stored("2", before=first)
    store.keep(first)
    store.keep(second)
    assert store.bytes_held == 3 * ENTRY_BYTES
    store.forget(first)
    assert store.bytes_held == 3 * ENTRY_BYTES  # the second goes on from it
    assert [turn.name for turn in second.turns()] == ["1", "2"]
    store.keep(stored("3", size=ENTRY_BYTES))  # which takes the room of both
    assert names(store, "1", "2", "3") == ["3"]
    assert store.bytes_held == 2 * ENTRY_BYTES
    store.keep(stored("4", before=second))  # whose request began before that
    assert names(store, "3", "4") == ["4"]
    assert store.bytes_held == 4 * ENTRY_BYTES
    store.keep(stored("5", size=4 * ENTRY_BYTES))  # more than there is room for
    assert (store.bytes_held, store.count) == (0, 0)


def test_nobody_pushes_out_the_answers_of_a_tenant_with_fewer() -> None:
    store = ResponseStore(most=4)
    store.keep(stored("b1", "b"))
    for at in range(9):
        store.keep(stored(f"a{at}"))
    assert names(store, "b1", tenant="b") == ["b1"]
    assert names(store, *(f"a{at}" for at in range(9))) == ["a6", "a7", "a8"]


def test_tools_that_agents_send_to_any_server_are_left_out(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    sent: Any = [{"type": "web_search"}, {"type": "namespace", "name": "agents", "tools": []}]
    more = {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "store": False}
    client.responses.create(model="tiny", input="hi", tools=sent, tool_choice="auto", extra_body=more)
    client.responses.create(model="tiny", input="hi")
    with_tools, without = (body.prompt for body in engine.bodies)
    assert with_tools == without
