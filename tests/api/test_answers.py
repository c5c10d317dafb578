"""Tool calls: found in text of any format, however it is cut; forced ones by a grammar."""

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

from kvloom.api.answers.call_formats import ToolCallFormat
from kvloom.api.answers.calls import Kind
from kvloom.api.answers.forced import forced_guide
from kvloom.api.answers.reader import AnswerFormat, Thinking
from kvloom.api.tokenizer import Tokenizer
from kvloom.engine.guide import GuideCompiler
from tests.api.scripted import UNTIMED, ScriptedEngine, byte_level, card, says, token

WEATHER = ("weather", {"city": "Zürich"})
TIME: tuple[str, Any] = ("time", {})
ARGUMENTS = '{"name": "weather", "arguments": {"city": "Zürich"}}'
PARAMETERS = '{"name": "weather", "parameters": {"city": "Zürich"}}'
GRAPH = ("graph", {"code": "if a < b:\n  x = [1]", "depth": 3, "wide": True, "tags": ["a", "b"]})
SCHEMAS: dict[str, Any] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}}},
    "graph": {"properties": {"code": {"type": "string"}, "depth": {"type": "integer"}}},
    "time": {},
}
CODER = """<tool_call>
<function=graph>
<parameter=code>
if a < b:
  x = [1]
</parameter>
<parameter=depth>
3
</parameter>
<parameter=wide>
true
</parameter>
<parameter=tags>
["a", "b"]
</parameter>
</function>
</tool_call>"""
GLM = """<tool_call>graph
<arg_key>code</arg_key>
<arg_value>if a < b:
  x = [1]</arg_value>
<arg_key>depth</arg_key>
<arg_value>3</arg_value>
<arg_key>wide</arg_key>
<arg_value>true</arg_value>
<arg_key>tags</arg_key>
<arg_value>["a", "b"]</arg_value>
</tool_call>"""
GEMMA = """call:graph{code:<|"|>if a < b:
  x = [1]<|"|>,depth:3,tags:[<|"|>a<|"|>,<|"|>b<|"|>],wide:true}"""
CASES: list[tuple[ToolCallFormat, str, str, list[tuple[str, Any]]]] = [
    (ToolCallFormat.HERMES, f"Let me see.\n<tool_call>\n{ARGUMENTS}\n</tool_call>", "Let me see.", [WEATHER]),
    (
        ToolCallFormat.HERMES,
        f'<tool_call>{ARGUMENTS}</tool_call>\n<tool_call>{{"name": "time", "arguments": {{}}}}</tool_call>\n',
        "",
        [WEATHER, TIME],
    ),
    (ToolCallFormat.HERMES, f"<tool_call>{ARGUMENTS}", "", [WEATHER]),
    (ToolCallFormat.HERMES, '<tool_call>{"arguments": {}, "name": "time"}</tool_call>', "", [TIME]),
    (
        ToolCallFormat.HERMES,
        "a < b <tool_call>no JSON</tool_call> c",
        "a < b <tool_call>no JSON</tool_call> c",
        [],
    ),
    (ToolCallFormat.HERMES, "1 <tool_cal or so ", "1 <tool_cal or so ", []),
    (ToolCallFormat.HERMES, CODER, "", [GRAPH]),
    (
        ToolCallFormat.HERMES,
        "<tool_call>\n<function=time>\n</function>\n</tool_call> after",
        " after",
        [TIME],
    ),
    (ToolCallFormat.HERMES, GLM, "", [GRAPH]),
    (ToolCallFormat.HERMES, "\n<tool_call>time\n</tool_call>", "", [TIME]),
    (ToolCallFormat.MISTRAL, f"[TOOL_CALLS] [{ARGUMENTS}]", "", [WEATHER]),
    (
        ToolCallFormat.MISTRAL,
        f'[TOOL_CALLS][{ARGUMENTS[:-1]}, "id": "9"}}, {{"name": "time", "arguments": {{}}}}]',
        "",
        [WEATHER, TIME],
    ),
    (
        ToolCallFormat.MISTRAL,
        '[TOOL_CALLS]weather[ARGS]{"city": "Zürich"}[TOOL_CALLS]time{}',
        "",
        [WEATHER, TIME],
    ),
    (ToolCallFormat.MISTRAL, '[TOOL_CALLS]weather[CALL_ID]a9[ARGS]{"city": "Zürich"}', "", [WEATHER]),
    (ToolCallFormat.MISTRAL, "a list [1] of [TOOLS]", "a list [1] of [TOOLS]", []),
    (ToolCallFormat.LLAMA, PARAMETERS, "", [WEATHER]),
    (
        ToolCallFormat.LLAMA,
        f' <|python_tag|>{PARAMETERS}; {{"name": "time", "parameters": {{}}}}',
        "",
        [WEATHER, TIME],
    ),
    (ToolCallFormat.LLAMA, '{"just": "JSON {"}', '{"just": "JSON {"}', []),
    (
        ToolCallFormat.LLAMA,
        PARAMETERS.replace("weather", "unknown"),
        PARAMETERS.replace("weather", "unknown"),
        [],
    ),
    (ToolCallFormat.LLAMA, f"{PARAMETERS}\nand so on", "\nand so on", [WEATHER]),
    (ToolCallFormat.LLAMA, f"See: {PARAMETERS}", f"See: {PARAMETERS}", []),
    (ToolCallFormat.GRANITE, f"<|tool_call|>[{ARGUMENTS}]", "", [WEATHER]),
    (ToolCallFormat.GRANITE, f"<|tool_call|>[{ARGUMENTS}]<|/tool_call|> so", " so", [WEATHER]),
    (
        ToolCallFormat.MISTRAL,
        f'[TOOL_CALLS][{ARGUMENTS}, {{"id": "1", "arguments": {{}}, "name": "time"}}] after',
        " after",
        [WEATHER, TIME],
    ),
    (
        ToolCallFormat.HERMES,
        f"<tool_call>{ARGUMENTS[:-1]}</tool_call>\n<tool_call>\n{ARGUMENTS}</tool_call>Done.",
        "Done.",
        [WEATHER, WEATHER],
    ),
    (ToolCallFormat.HERMES, "<tool_call><function=time>\nOops</function></tool_call>Text", "Text", [TIME]),
    (
        ToolCallFormat.HERMES,
        "<tool_call><function=time>\n</function>\n<tool_call><function=time></function></tool_call>",
        "",
        [TIME, TIME],
    ),
    (
        ToolCallFormat.HERMES,
        '<tool_call><function=graph><parameter=depth>NaN</parameter><parameter=code>"\\ud83d"',
        "",
        [("graph", {"depth": "NaN", "code": '"\\ud83d"'})],
    ),
    (
        ToolCallFormat.HERMES,
        '<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "time"}</tool_call>',
        "",
        [("time", {"a": "?"})],
    ),
    (
        ToolCallFormat.DEEPSEEK,
        'See.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Zürich"}'
        "<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "See.",
        [WEATHER, TIME],
    ),
    (
        ToolCallFormat.DEEPSEEK,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Zürich"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        [WEATHER],
    ),
    (
        ToolCallFormat.KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Zürich"}<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "",
        [WEATHER, TIME],
    ),
    (
        ToolCallFormat.GEMMA,
        f"<|tool_call>{GEMMA}<tool_call|><|tool_call>call:time{{}}<tool_call|>",
        "",
        [GRAPH, TIME],
    ),
    (
        ToolCallFormat.GEMMA,
        "<|tool_call>call:graph{code:3,<tool_call|>",
        "<|tool_call>call:graph{code:3,<tool_call|>",
        [],
    ),
    (
        ToolCallFormat.FUNCTION_GEMMA,
        "<start_function_call>call:weather{city:<escape>Zürich<escape>}<end_function_call>",
        "",
        [WEATHER],
    ),
    (
        ToolCallFormat.HARMONY,
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.weather <|constrain|>json<|message|>{"city": "Zürich"}',
        "",
        [WEATHER],
    ),
    (
        ToolCallFormat.HARMONY,
        "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant<|channel|>final<|message|>c <| d<",
        "c <| d<",
        [],
    ),
    (ToolCallFormat.HARMONY, "plain < text", "plain < text", []),
    (
        ToolCallFormat.HARMONY,
        "<|channel|>analysis<|message|>x<|end|>Hello, the answer",
        "Hello, the answer",
        [],
    ),
    (
        ToolCallFormat.HARMONY,
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Zürich"}<|call|>',
        "",
        [WEATHER],
    ),
    (ToolCallFormat.HARMONY, f"<|channel|>{'x' * 600}", f"<|channel|>{'x' * 600}", []),
    (ToolCallFormat.HARMONY, "<|channel|>commentary to=functions.time<|message|>", "", [TIME]),
]
Read = tuple[str, str, list[tuple[str, str]]]


def parse(
    answer_format: AnswerFormat,
    pieces: list[str],
    *,
    opened: bool = False,
    whole: bool = False,
    tools: dict[str, Any] = SCHEMAS,
) -> Read:
    """Returns the text, the thoughts and the calls of an answer."""
    reader = answer_format.reader(tools, thinks=True, opened=opened, whole_calls=whole)
    text, thoughts, calls = "", "", list[tuple[str, str]]()
    for piece in [*pieces, None]:
        for part in reader.take(piece or "", last=piece is None):
            match part.kind:
                case Kind.TEXT:
                    text += part.text
                case Kind.THOUGHT:
                    thoughts += part.text
                case Kind.CALL:
                    calls.append((part.text, ""))
                case Kind.ARGUMENTS:
                    name, before = calls[part.call]
                    calls[part.call] = name, before + part.text
    return text, thoughts, calls


def cut(data: st.DataObject, text: str) -> list[str]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=9)) | {0, len(text)})
    return [text[begin:end] for begin, end in pairwise(cuts)]


@pytest.mark.parametrize(("call_format", "text", "shown", "calls"), CASES)
@UNTIMED
@given(data=st.data(), whole=st.booleans())
def test_calls_however_the_text_is_cut(
    call_format: ToolCallFormat,
    text: str,
    shown: str,
    calls: list[tuple[str, Any]],
    data: st.DataObject,
    whole: bool,
) -> None:
    answer_format = AnswerFormat(call_format)
    found, _, made = told = parse(answer_format, [text])
    assert (found, [(name, json.loads(arguments)) for name, arguments in made]) == (shown, calls)
    assert parse(answer_format, cut(data, text), whole=whole) == told
    assert parse(answer_format, list(text), whole=whole) == told


OPEN = '{"name": "weather", "arguments": {"city": "Zür'
KIMI_HEAD = "<|tool_call_begin|>weather:0<|tool_call_argument_begin|>"
KIMI = f"<|tool_calls_section_begin|>{KIMI_HEAD}"
QUOTED = '{"city": "</tool_call>\\\\", "note": "a \\" <|tool_call_end|></tool_call> b"}'


@pytest.mark.parametrize(
    ("call_format", "text", "shown", "calls"),
    [
        (ToolCallFormat.HERMES, f"<tool_call>{OPEN}</tool_call>", "", [("weather", OPEN[-13:])]),
        (
            ToolCallFormat.HERMES,
            f'<tool_call>{OPEN}</tool_call> "So", he',
            ' "So", he',
            [("weather", OPEN[-13:])],
        ),
        (
            ToolCallFormat.HERMES,
            f"<tool_call>{OPEN}</tool_call> he says",
            " he says",
            [("weather", OPEN[-13:])],
        ),
        (ToolCallFormat.HERMES, f'<tool_call>{OPEN}"</tool_call> so', " so", [("weather", OPEN[-13:] + '"')]),
        (ToolCallFormat.HERMES, f"<tool_call>{OPEN}</tool_cal", "", [("weather", OPEN[-13:] + "</tool_cal")]),
        (
            ToolCallFormat.HERMES,
            f"<tool_call>{OPEN}</tool_call><tool_call><function=time></function></tool_call>",
            "",
            [("weather", OPEN[-13:]), ("time", "{}")],
        ),
        (
            ToolCallFormat.HERMES,
            f"<tool_call>{OPEN}</tool_call>\n<tool_call>{ARGUMENTS}</tool_call>.",
            ".",
            [("weather", OPEN[-13:]), ("weather", '{"city": "Zürich"}')],
        ),
        (ToolCallFormat.GRANITE, f"<|tool_call|>[{OPEN}<|/tool_call|> so", " so", [("weather", OPEN[-13:])]),
        (
            ToolCallFormat.KIMI,
            f'{KIMI}{{"city": "Z<|tool_call_end|>{KIMI_HEAD}{{}}<|tool_calls_section_end|> so',
            " so",
            [("weather", '{"city": "Z'), ("weather", "{}")],
        ),
        (
            ToolCallFormat.HERMES,
            f'<tool_call>{{"name": "weather", "arguments": {QUOTED}}}</tool_call> so',
            " so",
            [("weather", QUOTED)],
        ),
        (ToolCallFormat.KIMI, f"{KIMI}{QUOTED}<|tool_call_end|>", "", [("weather", QUOTED)]),
    ],
)
@UNTIMED
@given(data=st.data())
def test_a_mark_ends_arguments_that_have_no_end(
    call_format: ToolCallFormat, text: str, shown: str, calls: list[tuple[str, str]], data: st.DataObject
) -> None:
    """A mark in a string that goes on after it is text of the string."""
    answer_format = AnswerFormat(call_format)
    for pieces in ([text], list(text), cut(data, text)):
        assert parse(answer_format, pieces) == (shown, "", calls)


def test_arguments_are_held_back_no_longer_than_a_mark_may_come() -> None:
    reader = AnswerFormat(ToolCallFormat.HERMES).reader(SCHEMAS, thinks=True, opened=False)
    reader.take(f"<tool_call>{OPEN}", last=False)
    shown = [reader.take(piece, last=False) for piece in ("a <", "/b", "</tool_call>", 'c"', ", ", "d")]
    assert ["".join(part.text for part in parts) for parts in shown] == [
        "a ",
        "</b",
        "",
        "",
        '</tool_call>c", ',
        "d",
    ]


MARKS = ["<tool_call>", "</tool_call>", "<function=time>", "[TOOL_CALLS]", "<|tool_call|>", "<|python_tag|>"]
MARKS += [
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁calls▁end｜>",
    "<|tool_call>",
]
MARKS += [
    "<tool_call|>",
    "call:time{",
    "<|channel|>",
    "<|message|>",
    "final",
    " to=f",
    "<|end|>",
    "<|start|>",
]
MARKS += [
    "<think>",
    "</think>",
    '{"name": "time", "arguments": ',
    "{}",
    "}",
    "{",
    "]",
    "[",
    '"',
    "\\",
    " ",
    "\n",
]
MARKS += [f"<tool_call>{ARGUMENTS}</tool_call>", f"[TOOL_CALLS][{ARGUMENTS}]", PARAMETERS, "<think><think>"]
MARKS += [f"<|tool_call|>[{ARGUMENTS}]", "<|/tool_call|>", "to=functions.time", "\n\n", "<parameter=depth>"]
MARKS += [KIMI, "<|tool_call_end|>", "<｜tool▁call▁end｜>", '"</tool_call>', '</tool_call>",']
MARKS += ["</parameter>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "time\n"]
TEXTS = st.lists(st.sampled_from([*MARKS, "a", "b", ",", ";", "<", "|"]), max_size=14).map("".join)


@UNTIMED
@given(st.sampled_from(list(ToolCallFormat)), TEXTS, st.booleans(), st.data())
def test_any_text_at_all(call_format: ToolCallFormat, text: str, opened: bool, data: st.DataObject) -> None:
    answer_format = AnswerFormat(call_format, Thinking("<think>", "</think>"))
    told = parse(answer_format, [text], opened=opened)
    assert parse(answer_format, list(text), opened=opened) == told
    assert parse(answer_format, cut(data, text), opened=opened) == told
    assert parse(answer_format, [text], opened=opened, whole=True) == told


def test_plain_text_streams_at_once() -> None:
    reader = AnswerFormat(ToolCallFormat.HERMES).reader(SCHEMAS, thinks=True, opened=False)
    shown = [reader.take(piece, last=False) for piece in ("Hello", " wor", "ld ", "again")]
    assert [part.text for parts in shown for part in parts] == ["Hello", " wor", "ld", " again"]


def test_arguments_stream_as_they_come() -> None:
    for call_format, text in (
        (ToolCallFormat.HERMES, f"<tool_call>{ARGUMENTS}"),
        (ToolCallFormat.HERMES, CODER),
        (ToolCallFormat.HERMES, GLM),
    ):
        reader = AnswerFormat(call_format).reader(SCHEMAS, thinks=True, opened=False)
        parts = [part for letter in text for part in reader.take(letter, last=False)]
        assert parts[0].kind is Kind.CALL
        assert len(parts) > 4
        assert {part.kind for part in parts[1:]} == {Kind.ARGUMENTS}


def test_forms() -> None:
    for call_format in ToolCallFormat:
        assert AnswerFormat.of(f"… {call_format.value} … <|message|>").tool_calls is call_format
    assert AnswerFormat.of("plain <|channel|>") == AnswerFormat()
    assert AnswerFormat.of(None) == AnswerFormat()
    assert AnswerFormat.of("{{ content.split('</think>') }}").thinks


THOUGHT = "\nI see: 1 < 2.\n"


@pytest.mark.parametrize(
    ("text", "opened", "thoughts", "shown"),
    [
        (f"<think>{THOUGHT}</think>\n\nYes.", False, THOUGHT.strip(), "Yes."),
        (f"\n<think>{THOUGHT}</think>\n\nYes.", False, THOUGHT.strip(), "Yes."),
        (f"{THOUGHT}</think>\n\nYes.", True, THOUGHT.strip(), "Yes."),
        (f"<think>{THOUGHT}</think>Yes.", True, THOUGHT.strip(), "Yes."),
        ("<think></think> Yes.", False, "", "Yes."),
        ("No <think>x</think> here", False, "", "No <think>x</think> here"),
        (" no", False, "", " no"),
        ("<think>so far ", False, "so far ", ""),
        ("<thin", False, "", "<thin"),
    ],
)
def test_thoughts_however_the_text_is_cut(text: str, opened: bool, thoughts: str, shown: str) -> None:
    answer_format = AnswerFormat(None, Thinking("<think>", "</think>"))
    assert parse(answer_format, [text], opened=opened) == (shown, thoughts, [])
    assert parse(answer_format, list(text), opened=opened) == (shown, thoughts, [])


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize("call_format", list(ToolCallFormat))
def test_a_forced_call_can_be_written_and_is_found(call_format: ToolCallFormat) -> None:
    model = card()
    guide = forced_guide(call_format, [("weather", SCHEMA)], Tokenizer(model.tokenizer), several=False)
    state = GuideCompiler(model).start(guide)
    key = "parameters" if call_format is ToolCallFormat.LLAMA else "arguments"
    call, given = json.dumps({"name": "weather", key: {"city": "Bern"}}), '{"city": "Bern"}'
    written = {
        ToolCallFormat.HERMES: f"<tool_call>\n{call}\n</tool_call>",
        ToolCallFormat.MISTRAL: f"[TOOL_CALLS][{call}]",
        ToolCallFormat.GRANITE: f"<|tool_call|>[{call}]",
        ToolCallFormat.LLAMA: call,
        ToolCallFormat.GEMMA: f"<|tool_call>{call}<tool_call|>",
        ToolCallFormat.FUNCTION_GEMMA: f"<start_function_call>{call}<end_function_call>",
        ToolCallFormat.DEEPSEEK: f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{given}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ToolCallFormat.KIMI: "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{given}<|tool_call_end|><|tool_calls_section_end|>",
        ToolCallFormat.HARMONY: "<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{given}",
    }[call_format]
    for one in byte_level().encode(written).ids:
        assert state.accepts(one)
    assert state.done
    assert parse(AnswerFormat(call_format), [written]) == ("", "", [("weather", given)])


def test_a_mark_that_is_an_added_token_is_drawn_as_that_token() -> None:
    """Such a token need not be special: in Qwen's vocabularies, and in guide's, <tool_call> is not."""
    vocabulary = HFTokenizer.from_str(byte_level().to_str())
    marks = ["<tool_call>", "</tool_call>"]
    vocabulary.add_tokens([AddedToken(mark, special=False) for mark in marks])
    model = card(tokenizer=vocabulary.to_str())
    guide = forced_guide(
        ToolCallFormat.HERMES, [("weather", SCHEMA)], Tokenizer(model.tokenizer), several=False
    )
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
    first, *rest = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert first.id
    assert first.function is not None
    assert first.function.name == "weather"
    arguments = [call.function.arguments or "" for call in (first, *rest) if call.function is not None]
    assert json.loads("".join(arguments)) == {"city": "Zürich"}
    assert {call.index for call in (first, *rest)} == {0}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_special_marks_are_seen(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda *_: [token("[TOOL_CALLS]"), *byte_level().encode(f"[{ARGUMENTS}]").ids]
    answer = client.chat.completions.create(
        model="mistral", messages=[{"role": "user", "content": "?"}], tools=TOOLS
    )
    assert answer.choices[0].message.tool_calls is not None
    assert answer.choices[0].message.content is None


def test_without_tools_or_a_call_format_the_text_is_the_text(client: openai.OpenAI) -> None:
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
