"""Chat templates that write past calls as each family does: what they write, our reader reads."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.testclient import TestClient

from kvloom.api.answers.call_formats import ToolCallFormat
from kvloom.api.answers.reader import AnswerFormat
from kvloom.api.app import create_app
from kvloom.api.tokenizer import Tokenizer
from tests.api.scripted import ScriptedEngine, byte_level, card, says
from tests.api.test_answers import parse

TOOLS: dict[str, Any] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}}},
    "graph": {
        "type": "object",
        "properties": {
            "code": {"type": "string"},
            "depth": {"type": "integer"},
            "wide": {"type": "boolean"},
            "scale": {"type": ["number", "null"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
    },
}
WEATHER = ("weather", {"city": "Zürich"})
GRAPH = (
    "graph",
    {"code": 'if a < b:\n  x = "1"', "depth": 3, "wide": True, "tags": ["a", "b"], "scale": None},
)
FRAME = (
    "{% for m in messages %}{% if m.role == 'tool' %}RESULT{% elif m.role == 'assistant' %}"
    "BEGIN{{ m.content }}CALLSEND{% else %}USER{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}BEGIN{% endif %}"
)


@dataclass(frozen=True)
class Written:
    """How a family writes the parts of a conversation: an excerpt of a chat template for each."""

    call_format: ToolCallFormat
    user: str
    begin: str
    calls: str
    end: str
    result: str
    several: bool = True
    """Whether an answer may have several calls."""

    @property
    def template(self) -> str:
        text = FRAME.replace("CALLS", self.calls).replace("BEGIN", self.begin).replace("END", self.end)
        return text.replace("RESULT", self.result).replace("USER", self.user)


def each(written: str, between: str = "") -> str:
    """Returns a loop over the calls of a message. written: what it writes of the call `f`."""
    comma = f"{{% if not loop.last %}}{between}{{% endif %}}" if between else ""
    return f"{{% for c in m.tool_calls or [] %}}{{% set f = c.function %}}{written}{comma}{{% endfor %}}"


CHATML: dict[str, Any] = {
    "user": "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n",
    "begin": "<|im_start|>assistant\n",
    "end": "<|im_end|>\n",
    "result": "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n",
}
INST: dict[str, Any] = {"user": "[INST]{{ m.content }}[/INST]", "begin": "", "end": "</s>"}
TURN: dict[str, Any] = {
    "user": "<start_of_turn>user\n{{ m.content }}<end_of_turn>\n",
    "begin": "<start_of_turn>model\n",
}
OBJECT = '{"name": {{ f.name|tojson }}, "arguments": {{ f.arguments|tojson }}}'
BARE = (
    "{% macro bare(v) %}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is boolean %}{{ v|lower }}"
    "{% elif v is iterable %}[{% for one in v %}{{ bare(one) }}{% if not loop.last %},{% endif %}"
    "{% endfor %}]"
    "{% else %}{{ v }}{% endif %}{% endmacro %}"
    "{% set ns = namespace(args=[]) %}{% for k, v in f.arguments|dictsort %}"
    "{% set ns.args = ns.args + [k ~ ':' ~ bare(v)] %}{% endfor %}{{ '{' ~ ns.args|join(',') ~ '}' }}"
)
WRITTEN = {
    "Hermes": Written(
        ToolCallFormat.HERMES, calls=each(f"<tool_call>\n{OBJECT}\n</tool_call>", "\n"), **CHATML
    ),
    "Qwen's coders": Written(
        ToolCallFormat.HERMES,
        calls=each(
            "\n<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
            "<parameter={{ k }}>\n{% if v is iterable and v is not string %}{{ v|tojson }}{% else %}"
            "{{ v|string }}{% endif %}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
        ),
        **CHATML,
    ),
    "GLM": Written(
        ToolCallFormat.HERMES,
        user="<|user|>\n{{ m.content }}",
        begin="<|assistant|>",
        calls=each(
            "\n<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
            "<arg_value>{% if v is string %}{{ v }}{% else %}{{ v|tojson }}{% endif %}</arg_value>\n"
            "{% endfor %}</tool_call>"
        ),
        end="<|endofturn|>",
        result="<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>",
    ),
    "Mistral": Written(
        ToolCallFormat.MISTRAL,
        calls="{% if m.tool_calls %}[TOOL_CALLS] ["
        + each(
            "{% if c.id|length != 9 %}{{ raise_exception('an id has 9 letters') }}{% endif %}"
            '{"name": {{ f.name|tojson }}, "arguments": {{ f.arguments|tojson }}, "id": "{{ c.id }}"}',
            ", ",
        )
        + "]{% endif %}",
        result='[TOOL_RESULTS] {"content": {{ m.content|tojson }}, "call_id": "{{ m.tool_call_id }}"}'
        "[/TOOL_RESULTS]",
        **INST,
    ),
    "Mistral since 2025": Written(
        ToolCallFormat.MISTRAL,
        calls=each("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments|tojson }}"),
        result="[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
        **INST,
    ),
    "Llama": Written(
        ToolCallFormat.LLAMA,
        user="<|start_header_id|>user<|end_header_id|>\n\n{{ m.content }}<|eot_id|>",
        begin="<|start_header_id|>assistant<|end_header_id|>\n\n",
        calls=each('{"name": "{{ f.name }}", "parameters": {{ f.arguments|tojson }}}'),
        end="<|eot_id|>{# <|python_tag|> #}",
        result="<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content }}<|eot_id|>",
        several=False,
    ),
    "Granite": Written(
        ToolCallFormat.GRANITE,
        user="<|start_of_role|>user<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
        begin="<|start_of_role|>assistant<|end_of_role|>",
        calls="{% if m.tool_calls %}<|tool_call|>[" + each(OBJECT, ", ") + "]{% endif %}",
        end="<|end_of_text|>\n",
        result="<|start_of_role|>tool<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
    ),
    "Phi": Written(
        ToolCallFormat.GRANITE,
        user="<|user|>{{ m.content }}<|end|>",
        begin="<|assistant|>",
        calls="{% if m.tool_calls %}<|tool_call|>[" + each(OBJECT, ", ") + "]<|/tool_call|>{% endif %}",
        end="<|end|>",
        result="<|tool_response|>{{ m.content }}<|end|>",
    ),
    "DeepSeek V3": Written(
        ToolCallFormat.DEEPSEEK,
        user="<｜User｜>{{ m.content }}",
        begin="<｜Assistant｜>",
        calls="{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
        + each(
            "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name + '\n```json\n' }}"
            "{{ f.arguments + '\n```<｜tool▁call▁end｜>' }}",
            "\n",
        )
        + "<｜tool▁calls▁end｜>{% endif %}",
        end="<｜end▁of▁sentence｜>",
        result="<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>",
    ),
    "DeepSeek V3.1": Written(
        ToolCallFormat.DEEPSEEK,
        user="<｜User｜>{{ m.content }}",
        begin="<｜Assistant｜>",
        calls="{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
        + each(
            "{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments + '<｜tool▁call▁end｜>' }}"
        )
        + "<｜tool▁calls▁end｜>{% endif %}",
        end="<｜end▁of▁sentence｜>",
        result="<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>",
    ),
    "Kimi": Written(
        ToolCallFormat.KIMI,
        user="<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>",
        begin="<|im_assistant|>assistant<|im_middle|>",
        calls="{% if m.tool_calls %}<|tool_calls_section_begin|>"
        + each(
            "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments|tojson }}"
            "<|tool_call_end|>"
        )
        + "<|tool_calls_section_end|>{% endif %}",
        end="<|im_end|>",
        result="<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}<|im_end|>",
    ),
    "Gemma 4": Written(
        ToolCallFormat.GEMMA,
        user="<|turn>user\n{{ m.content }}<turn|>\n",
        begin="<|turn>model\n",
        calls=each(f"<|tool_call>call:{{{{ f.name }}}}{BARE}<tool_call|>").replace("QUOTE", '<|"|>'),
        end="<turn|>\n",
        result='<|tool_response>response:{value:<|"|>{{ m.content }}<|"|>}<tool_response|>',
    ),
    "FunctionGemma": Written(
        ToolCallFormat.FUNCTION_GEMMA,
        calls=each(f"<start_function_call>call:{{{{ f.name }}}}{BARE}<end_function_call>").replace(
            "QUOTE", "<escape>"
        ),
        end="<end_of_turn>\n",
        result="<start_function_response>{{ m.content }}<end_function_response>",
        **TURN,
    ),
    "GPT-OSS": Written(
        ToolCallFormat.HARMONY,
        user="<|start|>user<|message|>{{ m.content }}<|end|>",
        begin="<|start|>assistant",
        calls=each(" to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments|tojson }}"),
        end="<|call|>",
        result="<|start|>functions.weather to=assistant<|channel|>commentary"
        "<|message|>{{ m.content }}<|end|>",
        several=False,
    ),
}


def rendered(template: str, messages: list[Any]) -> str:
    """Returns the prompt that a gateway makes of the messages."""
    engine = ScriptedEngine(says("so"), cards=[card(template=template, context_length=8192)])
    tools = [{"type": "function", "function": {"name": one, "parameters": its}} for one, its in TOOLS.items()]
    asked = {"model": "tiny", "messages": messages, "tools": tools, "max_tokens": 1}
    with TestClient(create_app(engine)) as http:
        http.post("/v1/chat/completions", json=asked).raise_for_status()
    return Tokenizer(byte_level().to_str()).decode(engine.bodies[-1].prompt, keep_special=True)


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
def test_what_a_template_writes_of_a_call_is_read_as_that_call(written: Written) -> None:
    answer_format, template = AnswerFormat.of(written.template), written.template
    assert answer_format.tool_calls is written.call_format
    wanted = [GRAPH, WEATHER] if written.several else [GRAPH]
    calls: list[Any] = [
        {
            "id": f"call_5eb63bbbe01eeed0_0_{at}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for at, (name, arguments) in enumerate(wanted)
    ]
    results: list[Any] = [
        {"role": "tool", "tool_call_id": one["id"], "content": f"said {at}"} for at, one in enumerate(calls)
    ]
    before = [{"role": "user", "content": "Draw it."}]
    prompt = rendered(template, before)
    whole = rendered(
        template, [*before, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    )
    assert whole.startswith(prompt)
    end = written.end.partition("{#")[0]
    answer, _, after = whole.removeprefix(prompt).partition(end)
    for pieces in ([answer], list(answer)):
        text, _, made = parse(answer_format, pieces, tools=TOOLS)
        assert (text.strip(), [(name, json.loads(given)) for name, given in made]) == ("", wanted)
    assert all(one["content"] in after for one in results)


def test_results_are_told_of_the_calls_that_they_belong_to() -> None:
    """The ids of other servers' calls are as the model knows ids. Those that are so already stay."""
    calls: list[Any] = [
        {"id": one, "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        for one in ("toolu_1", "functions.weather:7", "a1B2c3D4e")
    ]
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "rain"} for one in reversed(calls)]
    messages = [{"role": "user", "content": "And?"}, {"role": "assistant", "tool_calls": calls}, *results]
    for name, pattern, wanted in (
        ("Kimi", r"Return of (\S+)", ["functions.weather:2", "functions.weather:7", "functions.weather:0"]),
        ("Mistral", r'"call_id": "(\w+)"', ["a1B2c3D4e", "000000001", "000000000"]),
    ):
        assert re.findall(pattern, rendered(WRITTEN[name].template, messages)) == wanted
