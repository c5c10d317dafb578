"""The formats in which models write tool calls: a table of their syntax, and which of them a chat template
tells.

A new format is a member of `ToolCallFormat` and its row in `SYNTAX`, how such a call is forced (`forced`),
and a row in docs/serving.md. `CallsReader` with one of them is what vLLM calls a tool parser.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final


class ToolCallFormat(Enum):
    """The ways in which calls are written. The value is the mark with which they begin, which LLAMA may leave
    out. The first whose mark a template has is the template's, so that their order matters."""

    HARMONY = "<|channel|>"  # of GPT-OSS, which writes thoughts so, too; hence its own `HarmonyReader`
    DEEPSEEK = "<｜tool▁calls▁begin｜>"
    KIMI = "<|tool_calls_section_begin|>"
    GRANITE = "<|tool_call|>"  # Granite and Phi: <|tool_call|>[{"name": …, "arguments": …}]
    GEMMA = "<|tool_call>"  # <|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>
    FUNCTION_GEMMA = "<start_function_call>"  # the same with other marks
    HERMES = "<tool_call>"  # Hermes and Qwen: JSON; Qwen's coders and GLM: a tag for each parameter
    MISTRAL = "[TOOL_CALLS]"  # [TOOL_CALLS][{"name": …, "arguments": …}] or [TOOL_CALLS]name[ARGS]{…}
    LLAMA = "<|python_tag|>"  # {"name": …, "parameters": …}, several joined by ;


class Body(Enum):
    """The ways in which JSON follows a call's head."""

    OBJECT = "arguments within an object, which ends after them"
    ARGUMENTS = "arguments alone"


@dataclass(frozen=True, slots=True)
class Tags:
    """Parameters, each what `begin` matches (with a group `key`), its value, and `end`."""

    begin: re.Pattern[str]
    end: str


@dataclass(frozen=True, slots=True)
class Head:
    """How a call begins, up to its arguments. The pattern's one group that matches is the name."""

    pattern: re.Pattern[str]
    body: Body | Tags
    only_offered: bool = False
    """Whether a name counts only if it is that of an offered tool: other text looks like this, too."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """A block of calls, after its mark. Without heads it is read when it is whole."""

    heads: tuple[Head, ...]
    close: str = ""
    """The mark that ends the block; without one it ends after its call, or its array of calls."""
    between: re.Pattern[str] = re.compile(r"\s*+")
    """The text that may stand before the closing mark and the next call."""
    trailer: str = ""
    """A mark that may follow a block that has no closing mark."""
    marks: tuple[str, ...] = ()
    """Further marks that have to stay in the text, if they are special tokens."""

    @property
    def ends(self) -> tuple[str, ...]:
        """Returns the marks that end a call, whatever is left open in its arguments."""
        between = (mark for mark in self.marks if self.between.fullmatch(mark))
        return tuple(filter(None, (self.close, self.trailer, *between)))


# A model may write anything, letter by letter: so quantifiers are possessive, and heads have a length.
LONGEST_HEAD: Final = 512
_JSON: Final = re.compile(
    r'\{\s*+"name"\s*+:\s*+"(?P<name>(?:[^"\\]|\\.)*+)"\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
)
_OBJECT: Final = Head(_JSON, Body.OBJECT)
_CODER: Final = Head(
    re.compile(r"<function=(?P<name>[^>\s]++)>"),
    Tags(re.compile(r"\s*+<parameter=(?P<key>[^>]++)>"), "</parameter>"),
)
_GLM: Final = Head(
    re.compile(r"(?P<name>[\w.:-]++)\s*+(?=<arg_key>|</tool_call>)"),
    Tags(re.compile(r"\s*+<arg_key>(?P<key>[^<]++)</arg_key>\s*+<arg_value>"), "</arg_value>"),
    only_offered=True,
)
SYNTAX: Final[Mapping[ToolCallFormat, CallSyntax]] = {
    ToolCallFormat.HERMES: CallSyntax(
        (_OBJECT, _CODER, _GLM), "</tool_call>", re.compile(r"(?:\s|</function>)*+")
    ),
    ToolCallFormat.MISTRAL: CallSyntax(
        (
            _OBJECT,
            Head(
                re.compile(r"(?P<name>[\w.:-]++)\s*+(?:\[CALL_ID\]\w*+)?+\s*+(?:\[ARGS\])?+\s*+(?=\{)"),
                Body.ARGUMENTS,
            ),
        ),
        marks=("[ARGS]", "[CALL_ID]"),
    ),
    ToolCallFormat.LLAMA: CallSyntax((Head(_JSON, Body.OBJECT, only_offered=True),)),
    ToolCallFormat.GRANITE: CallSyntax((_OBJECT,), trailer="<|/tool_call|>"),
    ToolCallFormat.DEEPSEEK: CallSyntax(
        (
            Head(
                re.compile(  # of V3 and R1, and of V3.1
                    r"<｜tool▁call▁begin｜>\s*+(?:function<｜tool▁sep｜>(?P<old>[^\n<{]++)\n```json\n"
                    r"|(?P<name>[^<\n]++)<｜tool▁sep｜>)\s*+(?=\{)"
                ),
                Body.ARGUMENTS,
            ),
        ),
        "<｜tool▁calls▁end｜>",
        re.compile(r"(?:\s|```|<｜tool▁call▁end｜>)*+"),
        marks=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    ToolCallFormat.KIMI: CallSyntax(
        (
            Head(
                re.compile(
                    r"<\|tool_call_begin\|>\s*+(?:functions\.)?(?P<name>[\w.-]++)(?::\d++)?+\s*+"
                    r"<\|tool_call_argument_begin\|>\s*+(?=\{)"
                ),
                Body.ARGUMENTS,
            ),
        ),
        "<|tool_calls_section_end|>",
        re.compile(r"(?:\s|<\|tool_call_end\|>)*+"),
        marks=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    ToolCallFormat.GEMMA: CallSyntax((), "<tool_call|>", marks=('<|"|>',)),
    ToolCallFormat.FUNCTION_GEMMA: CallSyntax((), "<end_function_call>", marks=("<escape>",)),
}
QUOTES: Final = {ToolCallFormat.GEMMA: '<|"|>', ToolCallFormat.FUNCTION_GEMMA: "<escape>"}
_HARMONY_MARKS: Final = ("<|start|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_IDS: Final = {
    ToolCallFormat.KIMI: re.compile(r"functions\.[\w.:-]+:\d+"),  # a call's only name there
    ToolCallFormat.MISTRAL: re.compile(r"[A-Za-z0-9]{9}"),  # templates may refuse any other
}
"""The ids of calls in formats whose templates show them to the model."""


def fit_ids(call_format: ToolCallFormat | None, messages: list[dict[str, Any]]) -> None:
    """Gives the calls of past messages, which are as templates are given them, and their results ids as the
    model knows them. Ids that are so already stay."""
    pattern = _IDS.get(call_format) if call_format else None
    if pattern is None:
        return
    fitting: dict[str, str] = {}
    count = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            given = call.get("id", "")
            if pattern.fullmatch(given):
                fitting[given] = given
            elif call_format is ToolCallFormat.KIMI:
                fitting[given] = f"functions.{call['function']['name']}:{count}"
            else:
                fitting[given] = f"{count:09d}"
            call["id"] = fitting[given]
            count += 1
        answers = message.get("tool_call_id")
        if answers in fitting:
            message["tool_call_id"] = fitting[answers]


def marks_of(call_format: ToolCallFormat) -> tuple[str, ...]:
    """Returns all marks that calls of the format are read by."""
    if call_format is ToolCallFormat.HARMONY:
        return (call_format.value, *_HARMONY_MARKS)
    syntax = SYNTAX[call_format]
    return (call_format.value, syntax.close, syntax.trailer, *syntax.marks)


def call_format_of(template: str) -> ToolCallFormat | None:
    """Returns how the model of a chat template writes calls, if it does."""
    for call_format in ToolCallFormat:
        if call_format.value in template and (
            call_format is not ToolCallFormat.HARMONY or "<|message|>" in template
        ):
            return call_format
    # what Llama 3's template says of calls, which need no mark there
    return ToolCallFormat.LLAMA if '"parameters": dictionary of argument' in template else None
