"""Tool calls: how model families write them, and how they are found in a model's output as it streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvloom.api.tokenizer import Tokenizer
from kvloom.types.request import JSON_SPACING, Guide


class Family(Enum):
    """The ways in which a call is written. The value is the mark with which it begins, which LLAMA may leave
    out."""

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
    """A call that a model has written. `arguments` is JSON text, as OpenAI sends it."""

    name: str
    arguments: str


def calls_in(value: Any) -> list[ToolCall] | None:
    """Returns the calls that a JSON value of a model's making stands for, or None if it is no call."""
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
    """Returns a grammar that allows nothing but calls of `tools`, which are names and parameter schemas."""
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
    """Returns the special tokens that must stay in the text for calls to be found in it."""
    if family is None:
        return frozenset()
    marks = (family.value, "</tool_call>", "[ARGS]")
    tokens = {token for mark in marks if (token := tokenizer.token_id(mark)) is not None}
    return tokenizer.special & tokens


def _literal(tokenizer: Tokenizer, mark: str) -> str:
    """Returns the mark in Lark: an added token by its number, any other as its text.

    llguidance takes every added token for one that no text can spell.
    """
    token = tokenizer.token_id(mark)
    return f"<[{token}]>" if token is not None and token in tokenizer.added else json.dumps(mark)


Found = tuple[str, list[ToolCall]]  # the text to show, and the calls after it


class ToolParser:
    """Finds calls in text that comes in any pieces. What looked like a call and is none comes out as text."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._mark = family.value
        self._text = ""  # the beginning of a mark, or space before one, which is held back
        self._call: _CallText | None = None
        self._began = False  # whether anything but space has been seen
        self.called = False

    def push(self, text: str) -> Found:
        shown: list[str] = []
        calls: list[ToolCall] = []
        while text:
            text = self._outside(text, shown) if self._call is None else self._inside(text, shown, calls)
        return "".join(shown), calls

    def take(self, text: str, *, last: bool) -> Found:
        """Returns the text and the calls of one piece. last: whether the answer ends with it."""
        shown, calls = self.push(text)
        if last:
            rest, more = self.end()
            shown, calls = shown + rest, calls + more
        return shown, calls

    def end(self) -> Found:
        """Returns what is left at the end of the text. A call without its end counts if it can be read."""
        if self._call is None:
            rest, self._text = self._text, ""
            return ("" if self.called and not rest.strip() else rest), []
        call, self._call = self._call, None
        found = call.parsed()
        if found is None:
            return call.raw, []
        self.called = True
        return "", found

    def _outside(self, text: str, shown: list[str]) -> str:
        """Moves text to `shown` up to a mark, and returns what follows the mark."""
        held = self._text + text
        self._text = ""
        if self._family is Family.LLAMA and not self._began:
            start = held.lstrip("; \n" if self.called else None)
            if start[:1] == "{":
                return self._open("", start)
            if not start:
                self._text = held
                return ""
        at = held.find(self._mark)
        if at >= 0:
            before = held[:at].rstrip()
            if before:
                shown.append(before)
            return self._open(self._mark, held[at + len(self._mark) :])
        keep = _held_from(held, self._mark)
        self._text = held[keep:]
        self._began = self._began or bool(held[:keep].strip())
        if keep:
            shown.append(held[:keep])
        return ""

    def _open(self, mark: str, rest: str) -> str:
        self._began = True
        self._call = _CallText(mark, _ENDS[self._family]())
        return rest

    def _inside(self, text: str, shown: list[str], calls: list[ToolCall]) -> str:
        assert self._call is not None
        rest = self._call.push(text)
        if rest is None:
            return ""
        found = self._call.parsed()
        if found is None:
            shown.append(self._call.raw)
        else:
            calls.extend(found)
            self.called = True
            self._began = False  # another may follow at once
        self._call = None
        return rest


class _CallText:
    """The text of one call, from its mark on."""

    def __init__(self, mark: str, ends: Callable[[str], int | None]) -> None:
        self._mark = mark
        self._ends = ends
        self._pieces: list[str] = []

    @property
    def raw(self) -> str:
        return self._mark + "".join(self._pieces)

    def push(self, text: str) -> str | None:
        """Returns None while the call goes on, and what follows it once it has ended."""
        end = self._ends(text)
        self._pieces.append(text if end is None else text[:end])
        return None if end is None else text[end:]

    def parsed(self) -> list[ToolCall] | None:
        text = "".join(self._pieces).strip().removesuffix("</tool_call>").strip()
        name, brace, arguments = text.partition("{")
        try:
            if brace and name and name[0] not in "[\"'":  # Mistral's newer form: name{…} or name[ARGS]{…}
                call = {
                    "name": name.removesuffix("[ARGS]").strip(),
                    "arguments": json.loads(brace + arguments),
                }
                return calls_in(call)
            return calls_in(json.loads(text))
        except (ValueError, RecursionError):
            return None


class _EndTag:
    """Finds the place at which </tool_call> ends."""

    _TAG = "</tool_call>"

    def __init__(self) -> None:
        self._tail = ""

    def __call__(self, text: str) -> int | None:
        held = self._tail + text
        at = held.find(self._TAG)
        if at < 0:
            self._tail = held[-len(self._TAG) + 1 :]
            return None
        return at + len(self._TAG) - len(self._tail)


class _JsonEnd:
    """Finds the place at which the first bracketed JSON value ends, and looks at each character once. After a
    name, as Mistral writes it, only a brace begins the value."""

    def __init__(self) -> None:
        self._depth = 0
        self._named = False
        self._quoted = self._escaped = False

    def __call__(self, text: str) -> int | None:
        for at, letter in enumerate(text):
            if self._quoted:
                self._in_string(letter)
            elif self._depth == 0:
                self._before(letter)
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None

    def _in_string(self, letter: str) -> None:
        if self._escaped:
            self._escaped = False
        elif letter == "\\":
            self._escaped = True
        elif letter == '"':
            self._quoted = False

    def _before(self, letter: str) -> None:
        if letter == "{" or (letter == "[" and not self._named):
            self._depth = 1
        elif not letter.isspace():
            self._named = True


_ENDS: dict[Family, Callable[[], Callable[[str], int | None]]] = {
    Family.HERMES: _EndTag,
    Family.MISTRAL: _JsonEnd,
    Family.LLAMA: _JsonEnd,
}


def _held_from(text: str, mark: str) -> int:
    """Returns the start of a tail that may be the beginning of a mark, with the space before it."""
    for at in range(max(0, len(text) - len(mark) + 1), len(text)):
        if mark.startswith(text[at:]):
            return len(text[:at].rstrip())
    return len(text.rstrip())
