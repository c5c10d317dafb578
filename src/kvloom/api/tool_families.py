"""How model families write tool calls: told from the text of their chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvloom.api.tokenizer import Tokenizer
from kvloom.types.request import JSON_SPACING, Guide


class Family(Enum):
    """The value is the mark with which a call begins; LLAMA may also begin with the bare call."""

    HERMES = "<tool_call>"  # <tool_call>{"name": …, "arguments": …}</tool_call>
    MISTRAL = "[TOOL_CALLS]"  # [TOOL_CALLS][{"name": …, "arguments": …}] or [TOOL_CALLS]name{…}
    LLAMA = "<|python_tag|>"  # {"name": …, "parameters": …}, several joined by ;


def family_of(template: str | None) -> Family | None:
    if template is None:
        return None
    if Family.HERMES.value in template:
        return Family.HERMES
    if Family.MISTRAL.value in template:
        return Family.MISTRAL
    if Family.LLAMA.value in template or '"parameters": dictionary of argument' in template:
        return Family.LLAMA
    return None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON text, as OpenAI sends it."""

    name: str
    arguments: str


def calls_in(value: Any) -> list[ToolCall] | None:
    """The calls that a JSON value of a model's making stands for; None where it is no call."""
    several = value if isinstance(value, list) else [value]
    calls = [_call(one) for one in several]
    return [call for call in calls if call is not None] if calls and None not in calls else None


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        return ToolCall(value["name"], arguments)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def forced_guide(
    family: Family, tools: Sequence[tuple[str, dict[str, Any]]], tokenizer: Tokenizer, *, several: bool
) -> Guide:
    """A grammar in which nothing but calls of `tools` (names and parameter schemas) can be written."""
    key = "parameters" if family is Family.LLAMA else "arguments"
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
    if family is Family.LLAMA:
        rest = ' ("; " call)*' if several else ""
        return Guide("lark", f"start: call{rest}\ncall: %json {json.dumps(call)}\n", "tools")
    if family is Family.HERMES:
        mark, end = _literal(tokenizer, "<tool_call>"), _literal(tokenizer, "</tool_call>")
        rest = ' ("\\n" call)*' if several else ""
        body = f'call: {mark} "\\n" body "\\n" {end}\nbody: %json {json.dumps(call)}\n'
        return Guide("lark", f"start: call{rest}\n{body}", "tools")
    array = {"type": "array", "items": call, "minItems": 1, "x-guidance": JSON_SPACING} | (
        {} if several else {"maxItems": 1}
    )
    mark = _literal(tokenizer, Family.MISTRAL.value)
    return Guide("lark", f"start: {mark} body\nbody: %json {json.dumps(array)}\n", "tools")


def marks_of(family: Family | None, tokenizer: Tokenizer) -> frozenset[int]:
    """Special tokens of the vocabulary that must stay in the text for calls to be found in it."""
    if family is None:
        return frozenset()
    marks = (family.value, "</tool_call>", "[ARGS]")
    tokens = {token for mark in marks if (token := tokenizer.token_id(mark)) is not None}
    return tokenizer.special & tokens


def _literal(tokenizer: Tokenizer, mark: str) -> str:
    """In Lark: the token by its number where the mark is an added one, else its text. llguidance takes every
    added token for one that no text can spell."""
    token = tokenizer.token_id(mark)
    return f"<[{token}]>" if token is not None and token in tokenizer.added else json.dumps(mark)
