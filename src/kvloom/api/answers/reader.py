"""Reads an answer's text as it streams: thoughts, text and tool calls, in the order in which they come."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from kvloom.api.answers.call_formats import ToolCallFormat, call_format_of, marks_of
from kvloom.api.answers.calls import CallsReader, Kind, Part, held_from
from kvloom.api.tokenizer import Tokenizer

Tools = Mapping[str, Mapping[str, Any]]
"""The schemas of the parameters of the tools that are offered, by name."""


class _Stages(Protocol):
    def take(self, text: str, *, last: bool) -> list[Part]: ...


class AnswerReader:
    """Reads one choice. Text may come in any pieces: the parts joined are the same for every way to cut it
    up."""

    def __init__(self, stages: _Stages | None, *, whole_calls: bool = False) -> None:
        """stages: None if all of it is text. whole_calls: a call comes with all of its arguments."""
        self.plain = stages is None
        """Whether all of it is text."""
        self._stages = stages
        self._whole_calls = whole_calls
        self._waiting: list[Part] = []  # a call that is not whole
        self.calls = 0

    def take(self, text: str, *, last: bool) -> list[Part]:
        """Returns the parts of one piece. last: whether the answer ends with it."""
        if self._stages is None:
            return [Part(Kind.TEXT, text)] if text else []
        parts = [self._numbered(part) for part in self._stages.take(text, last=last)]
        return self._with_whole_calls(parts, last=last) if self._whole_calls else parts

    def _numbered(self, part: Part) -> Part:
        self.calls += part.kind is Kind.CALL
        return replace(part, call=self.calls - 1) if part.kind in (Kind.CALL, Kind.ARGUMENTS) else part

    def _with_whole_calls(self, parts: list[Part], *, last: bool) -> list[Part]:
        told: list[Part] = []
        for part in parts:
            if part.kind is not Kind.ARGUMENTS:
                told += self._waited()
            if part.kind in (Kind.CALL, Kind.ARGUMENTS):
                self._waiting.append(part)
            else:
                told.append(part)
        return told + self._waited() if last else told

    def _waited(self) -> list[Part]:
        """Returns the call that has waited, if there is one, with all of its arguments."""
        waited, self._waiting = self._waiting, []
        arguments = "".join(part.text for part in waited[1:])
        return [*waited[:1], *(replace(part, text=arguments) for part in waited[1:2])]


@dataclass(frozen=True, slots=True)
class Thinking:
    """The marks around a model's thoughts."""

    begin: str
    end: str


_THINKING: Final = (
    Thinking("<think>", "</think>"),  # DeepSeek, Qwen, GLM, Kimi, Nemotron
    Thinking("[THINK]", "[/THINK]"),  # Mistral
    Thinking("<|channel>thought", "<channel|>"),  # Gemma 4
    Thinking("<seed:think>", "</seed:think>"),
)
_THINKING_PARTS: Final = ("<|channel>",)
"""Special tokens that are parts of such marks."""
_TAIL: Final = 16  # tokens of a prompt that are looked at for an opened thought


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes its answers."""

    tool_calls: ToolCallFormat | None = None
    thinking: Thinking | None = None

    @classmethod
    def of(cls, template: str | None) -> AnswerFormat:
        """Returns the form that a chat template tells."""
        text = template or ""
        thinking = next((one for one in _THINKING if one.end in text), None)
        return cls(call_format_of(text), thinking)

    @property
    def thinks(self) -> bool:
        return self.thinking is not None or self.tool_calls is ToolCallFormat.HARMONY

    def marks(self, tokenizer: Tokenizer, *, calls: bool, thinks: bool) -> frozenset[int]:
        """Returns the special tokens that must stay in the text for its calls and thoughts to be found."""
        harmony = self.tool_calls is ToolCallFormat.HARMONY and (calls or thinks)
        marks = marks_of(self.tool_calls) if self.tool_calls and (calls or harmony) else ()
        if self.thinking is not None and thinks:
            marks += (self.thinking.begin, self.thinking.end, *_THINKING_PARTS)
        tokens = {token for mark in marks if mark and (token := tokenizer.token_id(mark)) is not None}
        return tokenizer.special & tokens

    def opened(self, prompt: list[int], tokenizer: Tokenizer) -> bool:
        """Returns whether the prompt ends with the mark that begins a thought."""
        if self.thinking is None:
            return False
        tail = tokenizer.decode(prompt[-_TAIL:], keep_special=True)
        return tail.rstrip().endswith(self.thinking.begin)

    def reader(
        self, tools: Tools | None, *, thinks: bool, opened: bool, whole_calls: bool = False
    ) -> AnswerReader:
        """Returns what reads a choice. tools: None to look for no calls; thinks: whether to look for
        thoughts; opened: whether the answer begins within one; whole_calls: as of `AnswerReader`."""
        return AnswerReader(self._stages(tools, thinks=thinks, opened=opened), whole_calls=whole_calls)

    def _stages(self, tools: Tools | None, *, thinks: bool, opened: bool) -> _Stages | None:
        if self.tool_calls is ToolCallFormat.HARMONY:
            return HarmonyReader() if thinks or tools is not None else None
        thoughts = _Thoughts(self.thinking, opened=opened) if thinks and self.thinking else None
        calls = None if tools is None or self.tool_calls is None else CallsReader(self.tool_calls, tools)
        return None if thoughts is None and calls is None else _Reader(thoughts, calls)


class _Reader:
    """Looks for one run of thoughts at the beginning, and for calls after it."""

    def __init__(self, thoughts: _Thoughts | None, calls: CallsReader | None) -> None:
        self._thoughts, self._calls = thoughts, calls

    def take(self, text: str, *, last: bool) -> list[Part]:
        parts: list[Part] = []
        if self._thoughts is not None:
            thought, text = self._thoughts.push(text, last=last)
            parts += [Part(Kind.THOUGHT, thought)] if thought else []
        if self._calls is None:
            return [*parts, Part(Kind.TEXT, text)] if text else parts
        parts += self._calls.push(text)
        return [*parts, *self._calls.end()] if last else parts


class _Thoughts:
    """Tells thoughts, which stand before anything else, from the text after them."""

    def __init__(self, marks: Thinking, *, opened: bool) -> None:
        self._marks, self._inside, self._over = marks, opened, False
        self._held = ""
        self._begun = False  # whether the mark that begins them has come
        self._trimming = True  # of space before what comes next

    def push(self, text: str, *, last: bool) -> tuple[str, str]:
        """Returns the thoughts and the text of a piece."""
        if self._over and not self._trimming:
            return "", text
        held, self._held = self._held + text, ""
        thought = ""
        if not self._over:
            thought, held = self._before_end(held, last=last)
        if not self._over:
            return thought, held
        if self._trimming:
            held = held.lstrip()
            self._trimming = not held
        return thought, held

    def _before_end(self, held: str, *, last: bool) -> tuple[str, str]:
        """Returns the thoughts up to their end, and what follows; what may become a mark is held back."""
        begin, end = self._marks.begin, self._marks.end
        if self._trimming:
            start = held.lstrip()
            if start.startswith(begin) and not self._begun:
                self._inside = self._begun = True
                held = start[len(begin) :]
            elif begin.startswith(start) and not self._begun and not last:
                self._held = held
                return "", ""
            elif not self._inside:
                self._over, self._trimming = True, False
                return "", held
            held = held.lstrip()
            self._trimming = not held
        at = held.find(end)
        if at >= 0:
            self._over = self._trimming = True
            return held[:at].rstrip(), held[at + len(end) :]
        keep = len(held) if last else held_from(held, end)
        self._held = held[keep:]
        return held[:keep], ""


_HEADER_END: Final = "<|message|>"
_ENDS: Final = re.compile(r"<\|(?:end|call|return|start|channel)\|>")
_LONGEST: Final = max(map(len, ("<|return|>", "<|channel|>", _HEADER_END)))
_LONGEST_HEADER: Final = 512
_ROLE: Final = re.compile(r"(?:<\|start\|>\w*+)?+\s*+")
_HEADERS: Final = ("<|start|>", "<|channel|>", "<|constrain|>", _HEADER_END, "to=")
_CALLED: Final = re.compile(r"\bto=(?:functions\.)?([\w.:-]+)")


class HarmonyReader:
    """Reads the answers of GPT-OSS: messages, each a header, `<|message|>` and its text.

    The form is told in OpenAI's document "OpenAI harmony response format".
    """

    def __init__(self) -> None:
        self._held = ""
        self._kind: Kind | None = None  # of the message that is open
        self._empty = False  # whether it is a call of which no arguments have come

    def take(self, text: str, *, last: bool) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        going = True
        while going:
            going = self._header(parts, last=last) if self._kind is None else self._body(parts, last=last)
        return parts

    def _header(self, parts: list[Part], *, last: bool) -> bool:
        """Reads a whole header, and returns whether a message begins. Text without a header is the answer."""
        role = _ROLE.match(self._held)
        start = role.end() if role else 0
        rest = self._held[start:]
        headed = any(rest.startswith(one) or one.startswith(rest) for one in _HEADERS)
        at = self._held.find(_HEADER_END) if headed else -1
        if at >= 0:
            header, self._held = self._held[:at], self._held[at + len(_HEADER_END) :]
            called = _CALLED.search(header)
            self._kind = Kind.ARGUMENTS if called else Kind.THOUGHT if "analysis" in header else Kind.TEXT
            self._empty = called is not None
            parts += [Part(Kind.CALL, called[1])] if called else []
            return True
        if headed and not last and len(self._held) < _LONGEST_HEADER:
            return False
        if headed and len(self._held) >= _LONGEST_HEADER:  # which is none
            parts.append(Part(Kind.TEXT, self._held))
            self._kind, self._held = Kind.TEXT, ""
        elif headed:
            self._held = ""
        else:
            self._kind, self._held = Kind.TEXT, rest if role and role[0].strip() else self._held
        return not headed

    def _body(self, parts: list[Part], *, last: bool) -> bool:
        """Reads text up to the message's end, and returns whether it has come."""
        assert self._kind is not None
        kind, end = self._kind, _ENDS.search(self._held)
        if end is None:
            tail = self._held.rfind("<|", max(0, len(self._held) - _LONGEST))
            tail = len(self._held) - 1 if tail < 0 and self._held.endswith("<") else tail
            keep = len(self._held) if last or tail < 0 else tail
            piece, self._held = self._held[:keep], self._held[keep:]
        else:
            piece, self._kind = self._held[: end.start()], None
            again = end[0] in ("<|start|>", "<|channel|>")
            self._held = self._held[end.start() if again else end.end() :]
        if piece:
            self._empty = False
            parts.append(Part(kind, piece))
        if self._empty and (end is not None or last):
            self._empty = False
            parts.append(Part(kind, "{}"))
        return end is not None
