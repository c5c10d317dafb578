"""Turns tokens into text as they come: detokenizing, and stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from kvloom.api.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 8  # tokens after which an unfinished character is taken to be broken


class StopStrings:
    """Stop strings over streamed text: a stop string is never shown, and nothing waits that cannot become
    one. Text may be fed in any pieces: what comes out is the text before the first stop string, the same for
    every way to cut it up."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Returns what can be shown now; after a hit, nothing any more."""
        if not self._stops:
            return text
        if self.hit is not None:
            return ""
        held = self._held + text
        found = [(at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            end, self.hit = min(found, key=lambda one: (one[0] + len(one[1]), one[0]))
            self._held = ""
            return held[:end]
        keep = self._border(held)
        self._held = held[keep:]
        return held[:keep]

    def end(self) -> str:
        """Returns what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _border(self, text: str) -> int:
        """Returns where the longest tail begins that could still become a stop string."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[at:]
            if any(stop.startswith(tail) for stop in self._stops):
                return at
        return len(text)


class Detokenizer(Protocol):
    """Tokens to text as they come, in whole characters only, whatever the tokens cut through. It never
    raises. The pieces joined are the text of all tokens; bytes that are no UTF-8 become U+FFFD."""

    def push(self, token: int) -> str:
        """Returns what this token makes sure of; the bytes of an unfinished character wait."""

    def end(self) -> str:
        """Returns what still waits."""


def detokenizer(tokenizer: Tokenizer, keep: frozenset[int] = frozenset()) -> Detokenizer:
    """Returns a detokenizer to which special tokens read as nothing, except those in `keep`."""
    hidden = tokenizer.special - keep
    return _Bytes(tokenizer, hidden) if tokenizer.spells_bytes else _Window(tokenizer, hidden)


class _Bytes:
    """A detokenizer for vocabularies whose tokens are runs of bytes: exact, and one look-up a token."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._spelled = tokenizer.spelled
        self._hidden = hidden
        self._decode = _UTF8("replace").decode

    def push(self, token: int) -> str:
        return "" if token in self._hidden else self._decode(self._spelled[token])

    def end(self) -> str:
        return self._decode(b"", True)


class _Window:
    """A detokenizer for any other vocabulary: it decodes the last few tokens with and without the new ones
    and takes the difference."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._tokens: list[int] = []
        self._read = 0  # tokens whose text is out

    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._tokens.append(token)
        return self._advance(patience=_LONGEST)

    def end(self) -> str:
        return self._advance(patience=0)

    def _advance(self, patience: int) -> str:
        waiting = len(self._tokens) - self._read
        before = self._decode(self._tokens[: self._read])
        now = self._decode(self._tokens)
        if not waiting or (now.endswith(_UNFINISHED) and waiting < patience):
            return ""
        self._tokens = self._tokens[self._read :]
        self._read = len(self._tokens)
        return now[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, keep_special=True)
