"""Calls that a request forces: a grammar that allows nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvloom.api.answers.call_formats import SYNTAX, ToolCallFormat
from kvloom.api.tokenizer import Tokenizer
from kvloom.types.request import JSON_SPACING, Guide

_NAMED: Final[
    Mapping[ToolCallFormat, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]]
] = {
    ToolCallFormat.DEEPSEEK: (
        ("<｜tool▁calls▁begin｜>",),
        ("<｜tool▁call▁begin｜>", "{name}", "<｜tool▁sep｜>"),
        ("<｜tool▁call▁end｜>",),
        ("<｜tool▁calls▁end｜>",),
    ),
    ToolCallFormat.KIMI: (
        ("<|tool_calls_section_begin|>",),
        ("<|tool_call_begin|>", "functions.{name}:0", "<|tool_call_argument_begin|>"),
        ("<|tool_call_end|>",),
        ("<|tool_calls_section_end|>",),
    ),
    ToolCallFormat.HARMONY: (
        (),
        ("<|channel|>", "commentary to=functions.{name} ", "<|constrain|>", "json", "<|message|>"),
        (),
        (),
    ),
}
"""The texts around calls, of families whose calls are a name and arguments: before all calls, before and
after the arguments of each, and after all."""


def forced_guide(
    call_format: ToolCallFormat,
    tools: Sequence[tuple[str, dict[str, Any]]],
    tokenizer: Tokenizer,
    *,
    several: bool,
) -> Guide:
    """Returns a grammar that allows nothing but calls of `tools`, which are names and parameter schemas."""
    if call_format in _NAMED:
        return _named(
            call_format, tools, tokenizer, several=several and call_format is not ToolCallFormat.HARMONY
        )
    key = "parameters" if call_format is ToolCallFormat.LLAMA else "arguments"
    call = {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": name}, key: parameters},
                "required": ["name", key],
                "additionalProperties": False,
            }
            for name, parameters in tools
        ],
        "x-guidance": JSON_SPACING,
    }
    if call_format is ToolCallFormat.LLAMA:
        rest = ' ("; " call)*' if several else ""
        return Guide("lark", f"start: call{rest}\ncall: %json {json.dumps(call)}\n", "tools")
    if closing := SYNTAX[call_format].close:
        mark, end = _literal(tokenizer, call_format.value), _literal(tokenizer, closing)
        within = ' "\\n" ' if call_format is ToolCallFormat.HERMES else " "
        rest = ' ("\\n" call)*' if several else ""
        body = f"call: {mark}{within}body{within}{end}\nbody: %json {json.dumps(call)}\n"
        return Guide("lark", f"start: call{rest}\n{body}", "tools")
    # Mistral's and Granite's calls are a list after the mark
    array = {"type": "array", "items": call, "minItems": 1, "x-guidance": JSON_SPACING} | (
        {} if several else {"maxItems": 1}
    )
    mark = _literal(tokenizer, call_format.value)
    return Guide("lark", f"start: {mark} body\nbody: %json {json.dumps(array)}\n", "tools")


def _named(
    call_format: ToolCallFormat,
    tools: Sequence[tuple[str, dict[str, Any]]],
    tokenizer: Tokenizer,
    *,
    several: bool,
) -> Guide:
    begin, head, end, close = _NAMED[call_format]

    def spelled(marks: Sequence[str], name: str = "") -> str:
        return " ".join(_literal(tokenizer, mark.replace("{name}", name)) for mark in marks)

    calls = " | ".join(f"call{at}" for at in range(len(tools)))
    lines = [f"start: {spelled(begin)} call{'+' if several else ''} {spelled(close)}", f"call: {calls}"]
    for at, (name, parameters) in enumerate(tools):
        given = json.dumps(parameters | {"x-guidance": JSON_SPACING})
        lines += [f"call{at}: {spelled(head, name)} given{at} {spelled(end)}", f"given{at}: %json {given}"]
    return Guide("lark", "\n".join(lines) + "\n", "tools")


def _literal(tokenizer: Tokenizer, mark: str) -> str:
    """Returns the mark in Lark: an added token by its number, any other as its text.

    llguidance takes every added token for one that no text can spell.
    """
    token = tokenizer.token_id(mark)
    return f"<[{token}]>" if token is not None and token in tokenizer.added else json.dumps(mark)
