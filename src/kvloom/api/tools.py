"""Finds tool calls in a model's output as it streams: text goes on at once, a call when it is complete."""

from __future__ import annotations

import json
from collections.abc import Callable

from kvloom.api.tool_families import Family, ToolCall, calls_in

Found = tuple[str, list[ToolCall]]  # text to show, then calls


class ToolParser:
    """Feed text in any pieces. What looked like a call and is none comes out as the text it is."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._mark = family.value
        self._text = ""  # held back: the beginning of a mark, or space before one
        self._call: _CallText | None = None
        self._began = False  # anything but space has been seen
        self.called = False

    def push(self, text: str) -> Found:
        shown: list[str] = []
        calls: list[ToolCall] = []
        while text:
            text = self._outside(text, shown) if self._call is None else self._inside(text, shown, calls)
        return "".join(shown), calls

    def end(self) -> Found:
        """What is left at the end of the text: a call without its end still counts where it can be read."""
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
        """Moves text to `shown` up to a mark; returns what follows the mark."""
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
        """None while the call goes on; what follows it, once it has ended."""
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
    """Where </tool_call> ends."""

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
    """Where the first bracketed JSON value ends, one look at each character. After a name, as Mistral writes
    it, only a brace begins the value."""

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
    """Where a tail begins that may be the beginning of a mark, with the space before it."""
    for at in range(max(0, len(text) - len(mark) + 1), len(text)):
        if mark.startswith(text[at:]):
            return len(text[:at].rstrip())
    return len(text.rstrip())
