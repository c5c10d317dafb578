"""Tool calls: how families of models write them, and how they are read from text as it streams."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from kvloom.api.answers.values import BareValue, JsonEnd


class Kind(Enum):
    """What a part of an answer is."""

    TEXT = "text"
    THOUGHT = "thought"
    CALL = "call"  # its text is the tool's name
    ARGUMENTS = "arguments"  # more JSON text of the last call's arguments


@dataclass(frozen=True, slots=True)
class Part:
    kind: Kind
    text: str
    call: int = 0
    """The number of the call in its answer."""


class Family(Enum):
    """The ways in which calls are written. The value is the mark with which they begin, which LLAMA may leave
    out."""

    HARMONY = "<|channel|>"  # of GPT-OSS, which is read by `HarmonyReader`
    DEEPSEEK = "<｜tool▁calls▁begin｜>"
    KIMI = "<|tool_calls_section_begin|>"
    GRANITE = "<|tool_call|>"  # Granite and Phi: <|tool_call|>[{"name": …, "arguments": …}]
    GEMMA = "<|tool_call>"  # <|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>
    FUNCTION_GEMMA = "<start_function_call>"  # the same with other marks
    HERMES = "<tool_call>"  # Hermes and Qwen: JSON; Qwen's coders and GLM: a tag for each parameter
    MISTRAL = "[TOOL_CALLS]"  # [TOOL_CALLS][{"name": …, "arguments": …}] or [TOOL_CALLS]name[ARGS]{…}
    LLAMA = "<|python_tag|>"  # {"name": …, "parameters": …}, several joined by ;


class _Body(Enum):
    """What follows a call's head."""

    OBJECT = "arguments within an object, which ends after them"
    ARGUMENTS = "arguments alone"


@dataclass(frozen=True, slots=True)
class _Head:
    """How a call begins, up to its arguments, and how these are written: as JSON, or by parameters."""

    pattern: re.Pattern[str]
    body: _Body | re.Pattern[str]
    known: bool = False
    """Whether only tools that are offered count, since anything may look like this head."""


@dataclass(frozen=True, slots=True)
class _Form:
    """A block of calls, after its mark."""

    heads: tuple[_Head, ...]
    close: str = ""
    """The mark that ends the block; without one it ends after its call, or its array of calls."""
    between: re.Pattern[str] = re.compile(r"\s*")
    """What may stand before and after each call."""
    marks: tuple[str, ...] = ()
    """Further marks that have to stay in the text, if they are special tokens."""


_STRING: Final = r'"(?P<name>(?:[^"\\]|\\.)*)"'
_OBJECT: Final = _Head(
    re.compile(rf'\{{\s*"name"\s*:\s*{_STRING}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'), _Body.OBJECT
)
_CODER: Final = _Head(
    re.compile(r"<function=(?P<name>[^>\s]+)>\s*"),
    re.compile(r"\s*<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>\s*", re.S),
)
_GLM: Final = _Head(
    re.compile(r"(?P<name>[\w.:-]+)\s*(?=<arg_key>|</tool_call>)"),
    re.compile(r"\s*<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*", re.S),
    known=True,
)
_FORMS: Final[Mapping[Family, _Form]] = {
    Family.HERMES: _Form((_OBJECT, _CODER, _GLM), "</tool_call>", re.compile(r"(?:\s|</function>)*")),
    Family.MISTRAL: _Form(
        (
            _OBJECT,
            _Head(
                re.compile(r"(?P<name>[\w.:-]+)\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?\s*(?=\{)"),
                _Body.ARGUMENTS,
            ),
        ),
        marks=("[ARGS]", "[CALL_ID]"),
    ),
    Family.LLAMA: _Form((_OBJECT,), marks=("<|python_start|>", "<|python_end|>")),
    Family.GRANITE: _Form((_OBJECT,), marks=("<|/tool_call|>",)),
    Family.DEEPSEEK: _Form(
        (
            _Head(
                re.compile(
                    r"<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>(?P<old>[^\n<]+)\n```json\n"
                    r"|(?P<name>[^<\n]+)<｜tool▁sep｜>)\s*(?=\{)"
                ),
                _Body.ARGUMENTS,
            ),
        ),
        "<｜tool▁calls▁end｜>",
        re.compile(r"(?:\s|```|<｜tool▁call▁end｜>)*"),
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    Family.KIMI: _Form(
        (
            _Head(
                re.compile(
                    r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?\s*"
                    r"<\|tool_call_argument_begin\|>\s*(?=\{)"
                ),
                _Body.ARGUMENTS,
            ),
        ),
        "<|tool_calls_section_end|>",
        re.compile(r"(?:\s|<\|tool_call_end\|>)*"),
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    Family.GEMMA: _Form((), "<tool_call|>", marks=('<|"|>',)),
    Family.FUNCTION_GEMMA: _Form((), "<end_function_call>", marks=("<escape>",)),
}
_QUOTES: Final = {Family.GEMMA: '<|"|>', Family.FUNCTION_GEMMA: "<escape>"}
HARMONY_MARKS: Final = ("<|start|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")


def marks_of(family: Family) -> tuple[str, ...]:
    """Returns all marks that calls of the family are read by."""
    if family is Family.HARMONY:
        return (family.value, *HARMONY_MARKS)
    form = _FORMS[family]
    return (family.value, form.close, *form.marks)


def family_of(template: str) -> Family | None:
    """Returns how the model of a chat template writes calls, if it does."""
    for family in Family:
        if family.value in template and (family is not Family.HARMONY or "<|message|>" in template):
            return family
    return Family.LLAMA if '"parameters": dictionary of argument' in template else None


class CallsReader:
    """Reads calls in text that comes in any pieces. What looked like a call and is none comes out as text."""

    def __init__(self, family: Family, tools: Mapping[str, Mapping[str, Any]]) -> None:
        """tools: the schemas of the parameters of the tools that are offered, by name."""
        self._family = family
        self._mark = family.value
        self._tools = tools
        self._text = ""  # the beginning of a mark, or space before one, which is held back
        self._block: _Block | None = None
        self._began = False  # whether anything but space has been seen
        self.called = False

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            text = self._outside(text, parts) if self._block is None else self._inside(text, parts)
        return parts

    def end(self) -> list[Part]:
        """Returns what is left at the end of the text. A call without its end counts if it can be read."""
        if self._block is None:
            rest, self._text = self._text, ""
            return _text("" if self.called and not rest.strip() else rest)
        block, self._block = self._block, None
        parts = block.end()
        self.called = self.called or block.called
        return parts

    def _outside(self, text: str, parts: list[Part]) -> str:
        """Moves text to `parts` up to a mark, and returns what follows the mark."""
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
            parts += _text(held[:at].rstrip())
            return self._open(self._mark, held[at + len(self._mark) :])
        keep = held_from(held, self._mark)
        self._text = held[keep:]
        self._began = self._began or bool(held[:keep].strip())
        parts += _text(held[:keep])
        return ""

    def _open(self, mark: str, rest: str) -> str:
        self._began = True
        self._block = _Block(self._family, mark, self._tools)
        return rest

    def _inside(self, text: str, parts: list[Part]) -> str:
        assert self._block is not None
        found, rest = self._block.push(text)
        parts += found
        if rest is None:
            return ""
        if self._block.called:
            self.called = True
            self._began = False  # another may follow at once
        self._block = None
        return rest


class _Block:
    """The calls after one mark."""

    def __init__(self, family: Family, mark: str, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self.called = False
        self._family, self._form, self._tools = family, _FORMS[family], tools
        self._raw, self._text = mark, ""
        self._in_array = False
        self._body: JsonEnd | re.Pattern[str] | None = None
        self._tail: JsonEnd | None = None
        """What is left of the object around the arguments."""
        self._whole = JsonEnd()
        """Where a block without a closing mark ends if no head fits."""
        self._seen = 0  # characters that it has looked at
        self._name, self._first = "", True

    def push(self, text: str) -> tuple[list[Part], str | None]:
        """Returns the parts, and what follows the block if it has ended."""
        parts: list[Part] = []
        self._raw += "" if self.called else text
        self._text += text
        while True:
            before = len(self._text), self._body, self._tail
            if isinstance(self._body, JsonEnd):
                self._json(self._body, parts)
            elif self._body is not None:
                self._parameters(self._body, parts)
            elif self._tail is not None:
                end = self._tail(self._text)
                self._text = "" if end is None else self._text[end:]
                self._tail = self._tail if end is None else None
            elif self._over(parts):
                return parts, self._text
            if before == (len(self._text), self._body, self._tail):
                return parts, None

    def end(self) -> list[Part]:
        if isinstance(self._body, re.Pattern):
            return [Part(Kind.ARGUMENTS, "{}" if self._first else "}")]
        if self.called:
            return []
        return self._read(self._text) or _text(self._raw)

    def _json(self, scanner: JsonEnd, parts: list[Part]) -> None:
        end = scanner(self._text)
        piece, self._text = (self._text, "") if end is None else (self._text[:end], self._text[end:])
        if piece:
            parts.append(Part(Kind.ARGUMENTS, piece))
        self._body = scanner if end is None else None

    def _parameters(self, pattern: re.Pattern[str], parts: list[Part]) -> None:
        """Turns each whole parameter into JSON."""
        while found := pattern.match(self._text):
            value = typed(found["value"], self._tools.get(self._name, {}), found["key"])
            piece = f"{json.dumps(found['key'], ensure_ascii=False)}: {value}"
            parts.append(Part(Kind.ARGUMENTS, ("{" if self._first else ", ") + piece))
            self._first, self._text = False, self._text[found.end() :]
        rest = self._form.between.sub("", self._text, count=1)
        if rest.startswith(self._form.close):
            parts.append(Part(Kind.ARGUMENTS, "{}" if self._first else "}"))
            self._body = None

    def _over(self, parts: list[Part]) -> bool:
        """Reads what stands between calls up to the next, and returns whether the block has ended."""
        form = self._form
        between = form.between.match(self._text)
        self._text = self._text[between.end() :] if between and self.called else self._text
        if form.close and self.called and self._text.startswith(form.close):
            self._text = self._text[len(form.close) :]
            return True
        if not form.close and self.called and (not self._in_array or self._text[:1] == "]"):
            self._text = self._text[1:] if self._in_array else self._text
            return True
        if self._begins(parts):
            return False
        return self._fails(parts)

    def _begins(self, parts: list[Part]) -> bool:
        """Reads a call's head, if it is there."""
        at = len(self._text) - len(self._text.lstrip(" \n\t\r,"))
        if not self._form.close and self._text[at : at + 1] == "[" and not self.called:
            at += 1 + len(self._text[at + 1 :]) - len(self._text[at + 1 :].lstrip())
            in_array = True
        else:
            in_array = self._in_array
        for head in self._form.heads:
            found = head.pattern.match(self._text, at)
            if found is None:
                continue
            name = next(one for one in found.groups() if one is not None).strip()
            if head.known and name not in self._tools:
                continue
            self.called, self._in_array, self._name, self._first = True, in_array, _unescaped(name), True
            parts.append(Part(Kind.CALL, self._name))
            self._text = self._text[found.end() :]
            self._body = head.body if isinstance(head.body, re.Pattern) else JsonEnd()
            self._tail = JsonEnd(depth=1) if head.body is _Body.OBJECT else None
            return True
        return False

    def _fails(self, parts: list[Part]) -> bool:
        """Looks for the block's end where no head fits, and reads the whole of it then."""
        close = self._form.close
        if close:
            at = self._text.find(close)
            if at < 0:
                return False
            inner, self._text = self._text[:at], self._text[at + len(close) :]
        elif self.called:
            rest = self._text.lstrip(" \n\t\r,")
            return rest != "" and not rest.startswith("{")
        else:
            end = self._whole(self._text[self._seen :])
            if end is None:
                self._seen = len(self._text)
                return False
            inner, self._text = self._text[: self._seen + end], self._text[self._seen + end :]
        raw = self._raw[: len(self._raw) - len(self._text)]
        if not self.called:
            parts += self._read(inner) or _text(raw)
        return True

    def _read(self, inner: str) -> list[Part]:
        """Returns the calls in the text of a whole block, if it holds some that can be read."""
        quote = _QUOTES.get(self._family)
        try:
            bare = _bare_call(inner, quote) if quote else None
            calls = bare or calls_in(json.loads(inner))
        except (ValueError, RecursionError):
            calls = None
        self.called = bool(calls)
        return [
            part
            for name, arguments in calls or []
            for part in (Part(Kind.CALL, name), Part(Kind.ARGUMENTS, arguments))
        ]


def calls_in(value: Any) -> list[tuple[str, str]] | None:
    """Returns names and arguments, as JSON text, of the calls that a JSON value of a model's making stands
    for, or None if it is no call."""
    several = value if isinstance(value, list) else [value]
    calls = [_call(one) for one in several]
    return [call for call in calls if call is not None] if calls and None not in calls else None


def _call(value: Any) -> tuple[str, str] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        return value["name"], arguments
    if not isinstance(arguments, dict):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)


_BARE: Final = re.compile(r"\s*call:(?P<name>[\w.:-]+)(?=\{)")


def _bare_call(inner: str, quote: str) -> list[tuple[str, str]] | None:
    found = _BARE.match(inner)
    if found is None:
        return None
    arguments = BareValue(inner[found.end() :], quote).read()
    return [(found["name"], json.dumps(arguments, ensure_ascii=False))]


def typed(text: str, schema: Mapping[str, Any], key: str) -> str:
    """Returns a parameter's text as JSON: a string where its schema says so, else what it reads as."""
    parameters = schema.get("properties")
    one = parameters.get(key) if isinstance(parameters, dict) else None
    kind = one.get("type") if isinstance(one, dict) else None
    if kind != "string":
        try:
            return json.dumps(json.loads(text), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _unescaped(name: str) -> str:
    try:
        return str(json.loads(f'"{name}"')) if "\\" in name else name
    except ValueError:
        return name


def _text(text: str) -> list[Part]:
    return [Part(Kind.TEXT, text)] if text else []


def held_from(text: str, mark: str) -> int:
    """Returns the start of a tail that may be the beginning of a mark, with the space before it."""
    for at in range(max(0, len(text) - len(mark) + 1), len(text)):
        if mark.startswith(text[at:]):
            return len(text[:at].rstrip())
    return len(text.rstrip())
