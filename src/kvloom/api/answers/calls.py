"""Tool calls, as they are read from text that streams: a tool-call parser."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvloom.api.answers.call_formats import LONGEST_HEAD, QUOTES, SYNTAX, Body, Tags, ToolCallFormat
from kvloom.api.answers.values import JsonEnd, StringRest, bare_call, calls_in, dumped, loaded, plain, typed


class Kind(Enum):
    """The kinds of parts of an answer."""

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

    def begins(self, before: Kind | None) -> bool:
        """Returns whether it begins an item of its own after one of the kind `before`, None for none."""
        return self.kind is Kind.CALL or (self.kind is not Kind.ARGUMENTS and self.kind is not before)


@dataclass(slots=True)
class Said:
    """The parts of an answer, by their kinds."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    _calls: list[tuple[Part, list[str]]] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            match part.kind:
                case Kind.TEXT:
                    self.texts.append(part.text)
                case Kind.THOUGHT:
                    self.thoughts.append(part.text)
                case Kind.CALL:
                    self._calls.append((part, []))
                case Kind.ARGUMENTS:
                    self._calls[-1][1].append(part.text)

    def __bool__(self) -> bool:
        return bool(self.texts or self.thoughts or self._calls)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def thought(self) -> str:
        return "".join(self.thoughts)

    @property
    def calls(self) -> list[tuple[Part, str]]:
        """Returns the calls, each with its arguments."""
        return [(call, "".join(arguments)) for call, arguments in self._calls]


class CallsReader:
    """Reads calls in text that comes in any pieces. What looked like a call and is none comes out as text."""

    def __init__(self, call_format: ToolCallFormat, tools: Mapping[str, Mapping[str, Any]]) -> None:
        """tools: the schemas of the parameters of the tools that are offered, by name."""
        self._format = call_format
        self._mark = call_format.value
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
        parts: list[Part] = []
        while (block := self._block) is not None:
            found, rest = block.end()
            parts += found
            self._leave(block)
            parts += self.push(rest)
        rest, self._text = self._text, ""
        return [*parts, *_text("" if self.called and not rest.strip() else rest)]

    def _outside(self, text: str, parts: list[Part]) -> str:
        """Moves text to `parts` up to a mark, and returns what follows the mark."""
        held = self._text + text
        self._text = ""
        if self._format is ToolCallFormat.LLAMA and not self._began:
            start = held.lstrip("; \n" if self.called else None)
            if start[:1] == "{":
                return self._open(held[: len(held) - len(start)], start)
            if not start:
                self._text = held
                return ""
        at = held.find(self._mark)
        if at >= 0:
            before = held[:at].rstrip()
            parts += _text(before)
            # the space comes with the mark if that is no call's
            return self._open(held[len(before) : at + len(self._mark)], held[at + len(self._mark) :])
        keep = held_from(held, self._mark)
        self._text = held[keep:]
        self._began = self._began or bool(held[:keep].strip())
        parts += _text(held[:keep])
        return ""

    def _open(self, mark: str, rest: str) -> str:
        self._began = True
        self._block = _Block(self._format, mark, self._tools)
        return rest

    def _inside(self, text: str, parts: list[Part]) -> str:
        assert self._block is not None
        found, rest = self._block.push(text)
        parts += found
        if rest is None:
            return ""
        self._leave(self._block)
        return rest

    def _leave(self, block: _Block) -> None:
        if block.called:
            self.called = True
            self._began = False  # another may follow at once
        self._block = None


class _Block:
    """The calls after one mark: space, a head, its body, in JSON the tail of the object around it, and so
    on."""

    def __init__(
        self, call_format: ToolCallFormat, mark: str, tools: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self.called = False
        self._format, self._syntax, self._tools = call_format, SYNTAX[call_format], tools
        self._ends = self._syntax.ends
        self._raw, self._text = mark, ""
        self._seen = 0  # characters of the text in which an end has been looked for
        self._in_array = False
        self._over = False
        self._name, self._first = "", True
        self._arguments: JsonEnd | None = None
        self._beyond: StringRest | None = None
        """Looks beyond a mark that stands in a string of the arguments, at the beginning of the text."""
        self._tail: JsonEnd | None = None
        self._tags: Tags | None = None
        self._key: str | None = None
        """The parameter whose value comes."""
        self._value: JsonEnd | None = None
        """Finds the end of a value that no head fits."""

    def push(self, text: str) -> tuple[list[Part], str | None]:
        """Returns the parts, and what follows the block if it has ended."""
        parts: list[Part] = []
        self._raw += "" if self.called else text
        self._text += text
        going = True
        while going and not self._over:
            if self._arguments is not None:
                going = self._json(self._arguments, parts)
            elif self._tail is not None:
                going = self._object_end(self._tail)
            elif self._tags is not None:
                going = self._parameters(self._tags, parts)
            else:
                going = self._closed() or self._begins(parts) or self._unfit(parts)
        return parts, self._text if self._over else None

    def end(self) -> tuple[list[Part], str]:
        """Returns the parts of what is left at the end of the text, and what follows the block."""
        parts: list[Part] = []
        if self._tags is not None:
            if self._key is not None:
                self._parameter(self._text, parts)
            return [*parts, Part(Kind.ARGUMENTS, "{}" if self._first else "}")], ""
        if self._beyond is not None:
            self._break_off()
            parts, follows = self.push("")
            found, rest = ([], follows) if follows is not None else self.end()
            return parts + found, rest
        if self._arguments is not None:
            return [Part(Kind.ARGUMENTS, self._text)] if self._text else [], ""
        if self._tail is not None:
            return [], ""
        return self._read(self._text) or _text(_rest(self._text) if self.called else self._raw), ""

    def _find(self, *marks: str) -> int:
        """Returns the position of the first of the marks, a part of which may have been looked at before; -1
        if none is there."""
        at = -1
        for mark in marks:
            found = self._text.find(mark, max(0, self._seen - len(mark))) if mark else -1
            at = found if at < 0 or 0 <= found < at else at
        if at < 0:
            self._seen = len(self._text)
        return at

    def _skip(self, count: int) -> None:
        self._text, self._seen = self._text[count:], 0

    def _json(self, scanner: JsonEnd, parts: list[Part]) -> bool:
        """Passes arguments on, up to their end, or to a mark that ends the call though they have none. In a
        string a mark does so only if the string does not go on after it."""
        if self._beyond is None:
            at = self._find(*self._ends)
            known = at if at >= 0 else min((tail_from(self._text, mark) for mark in self._ends), default=None)
            end = scanner(self._text[:known])
            self._pass(known if end is None else end, parts)
            if end is not None:
                self._arguments = None
                return True
            if at < 0:
                return False
            if not scanner.quoted:
                self._break_off()
                return True
            self._beyond = StringRest()
        goes_on = self._beyond(self._text[self._seen :])
        self._seen = len(self._text)
        if goes_on:
            scanner(self._text[: self._beyond.length])
            self._pass(self._beyond.length, parts)
            self._beyond = None
        elif goes_on is not None:
            self._break_off()
        return goes_on is not None

    def _pass(self, count: int | None, parts: list[Part]) -> None:
        """Passes on so many characters of the arguments, or all that there are."""
        piece = self._text[:count]
        parts += [Part(Kind.ARGUMENTS, piece)] if piece else []
        self._skip(len(piece))

    def _break_off(self) -> None:
        """Ends the call at the text's present position, which is at a mark, though its arguments have no
        end."""
        self._arguments = self._tail = self._beyond = None
        self._seen = 0

    def _object_end(self, scanner: JsonEnd) -> bool:
        """Skips to the end of the object around the arguments. A model may forget its last brace."""
        seen = self._seen
        end = scanner(self._text[seen:])
        closed = self._find(self._syntax.close)
        places = [*([] if end is None else [seen + end]), *([closed] if closed >= 0 else [])]
        self._seen = len(self._text)
        if not places:
            return False
        self._skip(min(places))
        self._tail = None
        return True

    def _parameters(self, tags: Tags, parts: list[Part]) -> bool:
        """Turns a parameter into JSON once it is whole, or ends the call."""
        if self._key is not None:
            end = self._find(tags.end)
            if end >= 0:
                self._parameter(self._text[:end], parts)
                self._skip(end + len(tags.end))
            return end >= 0
        found = tags.begin.match(self._text, 0, LONGEST_HEAD)
        if found is not None:
            self._key = found["key"].strip()
            self._skip(found.end())
            return True
        end = self._find(self._syntax.close, self._format.value)
        if end < 0:
            return False
        parts.append(Part(Kind.ARGUMENTS, "{}" if self._first else "}"))
        self._tags = None
        self._skip(end)
        return True

    def _parameter(self, text: str, parts: list[Part]) -> None:
        assert self._key is not None
        text = text.removeprefix("\n").removesuffix("\n")
        value = typed(text, self._tools.get(self._name, {}), self._key)
        parts.append(Part(Kind.ARGUMENTS, f"{'{' if self._first else ', '}{dumped(self._key)}: {value}"))
        self._first, self._key = False, None

    def _closed(self) -> bool:
        """Reads what stands after a call, and ends the block if it is over."""
        syntax = self._syntax
        if not self.called:
            return False
        if syntax.close:
            between = syntax.between.match(self._text)
            if between is not None and between.end():
                self._skip(between.end())
            if self._text.startswith(syntax.close):
                self._skip(len(syntax.close))
                self._over = True
            elif self._text.startswith(self._format.value):
                self._over = True  # the next block begins, and this one's closing mark is missing
            return self._over
        if self._in_array:
            rest = self._text.lstrip(" \n\t\r,")
            if not rest or rest[0] == "{":
                return False
            self._skip(len(self._text) - len(rest) + (rest[0] == "]"))
            self._in_array = False
        if syntax.trailer and syntax.trailer.startswith(self._text[: len(syntax.trailer)]):
            if self._text.startswith(syntax.trailer):
                self._skip(len(syntax.trailer))
                self._over = True
            return self._over
        self._over = True
        return True

    def _begins(self, parts: list[Part]) -> bool:
        """Reads a call's head, if it is there."""
        if self.called and not (self._syntax.close or self._in_array):
            return False
        at = _after(self._text, 0, " \n\t\r,")
        array = not self._syntax.close and not self.called and self._text[at : at + 1] == "["
        at = _after(self._text, at + 1, " \n\t\r") if array else at
        for head in self._syntax.heads:
            found = head.pattern.match(self._text, at, at + LONGEST_HEAD)
            if found is None:
                continue
            name = plain(_unescaped(next(one for one in found.groups() if one is not None).strip()))
            if head.only_offered and name not in self._tools:
                continue
            self.called, self._in_array = True, self._in_array or array
            self._name, self._first, self._value = name, True, None
            parts.append(Part(Kind.CALL, name))
            self._skip(found.end())
            self._tags = head.body if isinstance(head.body, Tags) else None
            self._arguments = None if self._tags else JsonEnd()
            self._tail = JsonEnd(depth=1) if head.body is Body.OBJECT else None
            return True
        return False

    def _unfit(self, parts: list[Part]) -> bool:
        """Looks for the end of what no head fits, and reads the whole of it once it has come."""
        before = len(self._text)
        if self._syntax.close:
            end = after = self._find(self._syntax.close)
            after += len(self._syntax.close)
        elif self.called and not self._in_array:
            return False  # a trailer may come
        else:
            self._value = self._value or JsonEnd()
            found = self._value(self._text[self._seen :])
            end = after = -1 if found is None else self._seen + found
            self._seen = len(self._text)
        if end < 0:
            return False
        inner, raw, called = self._text[:end], self._raw[: len(self._raw) - before + after], self.called
        self._value = None
        self._skip(after)
        parts += self._read(inner) or _text(_rest(inner) if called else raw)
        self._over = bool(self._syntax.close) or not called
        return True

    def _read(self, inner: str) -> list[Part]:
        """Returns the calls in the text of a whole block, or of one of its values, if it holds some."""
        quote = QUOTES.get(self._format)
        calls: list[tuple[str, str]] | None = None
        try:
            calls = (quote and bare_call(inner, quote)) or calls_in(loaded(inner.strip(" \n\t\r,")))
        except (ValueError, RecursionError):
            return []
        if self._format is ToolCallFormat.LLAMA and any(name not in self._tools for name, _ in calls or []):
            return []
        self.called = self.called or bool(calls)
        return [
            part
            for name, arguments in calls or []
            for part in (Part(Kind.CALL, name), Part(Kind.ARGUMENTS, arguments))
        ]


def _after(text: str, at: int, space: str) -> int:
    """Returns the first place from `at` on that is no space."""
    while at < len(text) and text[at] in space:
        at += 1
    return at


def _rest(text: str) -> str:
    """Returns what was left between calls, unless it is nothing but the rest of their brackets."""
    return text if text.strip("{}[],; \n\t\r`") else ""


def _unescaped(name: str) -> str:
    try:
        return str(json.loads(f'"{name}"')) if "\\" in name else name
    except ValueError:
        return name


def _text(text: str) -> list[Part]:
    return [Part(Kind.TEXT, text)] if text else []


def tail_from(text: str, mark: str) -> int:
    """Returns the start of a tail that may be the beginning of a mark; the text's end if there is none."""
    for at in range(max(0, len(text) - len(mark) + 1), len(text)):
        if mark.startswith(text[at:]):
            return at
    return len(text)


def held_from(text: str, mark: str) -> int:
    """Returns the start of a tail that may be the beginning of a mark, with the space before it."""
    return len(text[: tail_from(text, mark)].rstrip())
