"""Tool calls: found in any family's text, however it is cut; forced ones by a grammar."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from kvloom.api.tokenizer import Tokenizer
from kvloom.api.tools import Family, ToolCall, ToolParser, family_of, forced_guide
from kvloom.engine.guide import GuideCompiler
from tests.api.scripted import UNTIMED, ScriptedEngine, byte_level, card, says, token

WEATHER = ToolCall("weather", '{"city": "Zürich"}')
TIME = ToolCall("time", "{}")
ARGUMENTS = '{"name": "weather", "arguments": {"city": "Zürich"}}'
PARAMETERS = '{"name": "weather", "parameters": {"city": "Zürich"}}'
CASES: list[tuple[Family, str, str, list[ToolCall]]] = [
    (Family.HERMES, f"Let me see.\n<tool_call>\n{ARGUMENTS}\n</tool_call>", "Let me see.", [WEATHER]),
    (
        Family.HERMES,
        f'<tool_call>{ARGUMENTS}</tool_call>\n<tool_call>{{"name": "time", "arguments": {{}}}}</tool_call>\n',
        "",
        [WEATHER, TIME],
    ),
    (Family.HERMES, f"<tool_call>{ARGUMENTS}", "", [WEATHER]),
    (Family.HERMES, "a < b <tool_call>no JSON</tool_call> c", "a < b<tool_call>no JSON</tool_call> c", []),
    (Family.HERMES, "1 <tool_cal or so ", "1 <tool_cal or so ", []),
    (Family.MISTRAL, f"[TOOL_CALLS] [{ARGUMENTS}]", "", [WEATHER]),
    (Family.MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Zürich"}[TOOL_CALLS]time{}', "", [WEATHER, TIME]),
    (Family.MISTRAL, "a list [1] of [TOOLS]", "a list [1] of [TOOLS]", []),
    (Family.LLAMA, PARAMETERS, "", [WEATHER]),
    (
        Family.LLAMA,
        f' <|python_tag|>{PARAMETERS}; {{"name": "time", "parameters": {{}}}}',
        "",
        [WEATHER, TIME],
    ),
    (Family.LLAMA, '{"just": "JSON {"}', '{"just": "JSON {"}', []),
    (Family.LLAMA, f"See: {PARAMETERS}", f"See: {PARAMETERS}", []),
]


def parse(family: Family, pieces: list[str]) -> tuple[str, list[ToolCall]]:
    parser = ToolParser(family)
    found = [*(parser.push(piece) for piece in pieces), parser.end()]
    return "".join(text for text, _ in found), [call for _, calls in found for call in calls]


@pytest.mark.parametrize(("family", "text", "shown", "calls"), CASES)
@UNTIMED
@given(data=st.data())
def test_calls_however_the_text_is_cut(
    family: Family, text: str, shown: str, calls: list[ToolCall], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=9)) | {0, len(text)})
    pieces = [text[begin:end] for begin, end in pairwise(cuts)]
    assert parse(family, [text]) == (shown, calls)
    assert parse(family, pieces) == (shown, calls)
    assert parse(family, list(text)) == (shown, calls)


@UNTIMED
@given(st.sampled_from(list(Family)), st.text(alphabet='<>/[]{}"\\ ab;:tol_cTOL_CALS|', max_size=60))
def test_any_text_at_all(family: Family, text: str) -> None:
    shown, calls = parse(family, list(text))
    assert parse(family, [text]) == (shown, calls)


def test_plain_text_streams_at_once() -> None:
    parser = ToolParser(Family.HERMES)
    assert [parser.push(piece)[0] for piece in ("Hello", " wor", "ld ", "again")] == [
        "Hello",
        " wor",
        "ld",
        " again",
    ]


def test_families() -> None:
    assert family_of("… <tool_call> …") is Family.HERMES
    assert family_of("… [TOOL_CALLS] …") is Family.MISTRAL
    assert family_of("… <|python_tag|> …") is Family.LLAMA
    assert family_of("plain") is None
    assert family_of(None) is None


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize("family", list(Family))
def test_a_forced_call_can_be_written_and_is_found(family: Family) -> None:
    model = card()
    guide = forced_guide(family, [("weather", SCHEMA)], Tokenizer(model.tokenizer), several=False)
    state = GuideCompiler(model).start(guide)
    key = "parameters" if family is Family.LLAMA else "arguments"
    call = json.dumps({"name": "weather", key: {"city": "Bern"}})
    written = {
        Family.HERMES: f"<tool_call>\n{call}\n</tool_call>",
        Family.MISTRAL: f"[TOOL_CALLS][{call}]",
        Family.LLAMA: call,
    }[family]
    for one in byte_level().encode(written).ids:
        assert state.accepts(one)
    assert state.done
    assert parse(family, [written]) == ("", [ToolCall("weather", '{"city": "Bern"}')])


def test_a_mark_that_is_an_added_token_is_drawn_as_that_token() -> None:
    """Such a token need not be special: in Qwen's vocabularies, and in guide's, <tool_call> is not."""
    vocabulary = HFTokenizer.from_str(byte_level().to_str())
    marks = ["<tool_call>", "</tool_call>"]
    vocabulary.add_tokens([AddedToken(mark, special=False) for mark in marks])
    model = card(tokenizer=vocabulary.to_str())
    guide = forced_guide(Family.HERMES, [("weather", SCHEMA)], Tokenizer(model.tokenizer), several=False)
    state = GuideCompiler(model).start(guide)
    call = json.dumps({"name": "weather", "arguments": {"city": "Bern"}})
    written = vocabulary.encode(f"<tool_call>\n{call}\n</tool_call>").ids
    assert [written[0], written[-1]] == [vocabulary.token_to_id(mark) for mark in marks]
    for one in written:
        assert state.mask()[one // 32] >> (one % 32) & 1
        assert state.accepts(one)
    assert state.done


TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
HERMES_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>{{ tools | tojson if tools }}"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(
        says(f"See:\n<tool_call>{ARGUMENTS}</tool_call>"),
        cards=[card(template=HERMES_TEMPLATE), card("plain"), card("mistral", "[TOOL_CALLS]")],
    )


def test_tools_whole(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "weather?"}], tools=TOOLS
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "See:"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Zürich"}
    assert '"weather"' in byte_level().decode(engine.bodies[0].prompt)


def test_tools_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "weather?"}], tools=TOOLS, stream=True
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "See:"
    (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert call.index == 0
    assert call.function is not None
    assert call.function.name == "weather"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_special_marks_are_seen(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda *_: [token("[TOOL_CALLS]"), *byte_level().encode(f"[{ARGUMENTS}]").ids]
    answer = client.chat.completions.create(
        model="mistral", messages=[{"role": "user", "content": "?"}], tools=TOOLS
    )
    assert answer.choices[0].message.tool_calls is not None
    assert answer.choices[0].message.content is None


def test_without_tools_or_family_the_text_is_the_text(client: openai.OpenAI) -> None:
    for model, tools in (("tiny", []), ("plain", TOOLS)):
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "?"}], tools=tools
        )
        assert "<tool_call>" in (answer.choices[0].message.content or "")
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_tool_is_guided(client: openai.OpenAI, engine: ScriptedEngine, choice: Any) -> None:
    for model in ("tiny", "plain"):
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "?"}], tools=TOOLS, tool_choice=choice
        )
    hermes, plain = (body.sampling.guide for body in engine.bodies)
    assert hermes is not None
    assert plain is not None
    assert "<tool_call>" in hermes.text
    assert "parameters" in plain.text


def test_past_calls_reach_the_template_as_objects(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    template = (
        "{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function.arguments.city }}{% endfor %}"
    )
    engine.cards = [card(template=template)]
    function = {"name": "weather", "arguments": '{"city": "Bern"}'}
    client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "user", "content": "?"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": function}],  # type: ignore[typeddict-item]
            },
            {"role": "tool", "tool_call_id": "1", "content": "sun"},
        ],
    )
    assert byte_level().decode(engine.bodies[0].prompt) == "Bern"
