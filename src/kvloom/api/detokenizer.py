"""Tokens to text as they come: whole characters only, whatever the tokens cut through."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Protocol

from kvloom.api.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 8  # tokens after which an unfinished character is taken to be broken


class Detokenizer(Protocol):
    """Never raises. The pieces joined are the text of all tokens; bytes that are no UTF-8 become U+FFFD."""

    def push(self, token: int) -> str:
        """What this token makes sure of; the bytes of an unfinished character wait."""

    def end(self) -> str:
        """What still waits."""


def detokenizer(tokenizer: Tokenizer, keep: frozenset[int] = frozenset()) -> Detokenizer:
    """Special tokens read as nothing, except those in `keep`."""
    hidden = tokenizer.special - keep
    return _Bytes(tokenizer, hidden) if tokenizer.spells_bytes else _Window(tokenizer, hidden)


class _Bytes:
    """For vocabularies whose tokens are runs of bytes: exact, and one look-up a token."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._bytes_of: Callable[[int], bytes] = tokenizer.token_bytes
        self._hidden = hidden
        self._decode = _UTF8("replace").decode

    def push(self, token: int) -> str:
        return "" if token in self._hidden else self._decode(self._bytes_of(token))

    def end(self) -> str:
        return self._decode(b"", True)


class _Window:
    """For any other: decodes the last few tokens with and without the new ones and takes the difference."""

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
