"""Values in a model's text: where a JSON value ends, and values that are almost JSON."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final


class JsonEnd:
    """Finds the place at which the first bracketed JSON value ends, and looks at each character once. After a
    name, as Mistral writes it, only a brace begins the value."""

    def __init__(self, depth: int = 0) -> None:
        """depth: brackets that are open already."""
        self._depth = depth
        self._named = False
        self._quoted = self._escaped = False

    def __call__(self, text: str) -> int | None:
        """Returns the place after the value's end, or None if it goes on."""
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


_DEPTH: Final = 64
_WORD: Final = re.compile(r"[^,:{}\[\]]*")
_WORDS: Final = {"true": True, "false": False, "null": None, "None": None}


class BareValue:
    """A value as Gemma writes it: JSON with bare keys, and marks of its own for quotes."""

    def __init__(self, text: str, quote: str) -> None:
        self._text, self._quote, self._at = text, quote, 0

    def read(self) -> Any:
        """Returns the value at the beginning. Raises ValueError."""
        return self._value(0)

    def _value(self, depth: int) -> Any:
        if depth > _DEPTH:
            raise ValueError("too deep")
        if self._take("{"):
            return self._object(depth)
        if self._take("["):
            return self._list(depth)
        if self._take(self._quote):
            return self._string()
        word = self._word()
        if word in _WORDS:
            return _WORDS[word]
        number = float(word) if re.search(r"[.eE]", word) else int(word)
        if not math.isfinite(number):
            raise ValueError(f"{word} is no number of JSON")
        return number

    def _object(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        while not self._take("}"):
            key = self._string() if self._take(self._quote) else self._word()
            if not self._take(":"):
                raise ValueError(f"no value for {key}")
            made[key] = self._value(depth + 1)
            self._take(",")
        return made

    def _list(self, depth: int) -> list[Any]:
        made: list[Any] = []
        while not self._take("]"):
            made.append(self._value(depth + 1))
            self._take(",")
        return made

    def _string(self) -> str:
        end = self._text.index(self._quote, self._at)  # raises ValueError
        found, self._at = self._text[self._at : end], end + len(self._quote)
        return found

    def _word(self) -> str:
        found = _WORD.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        return found[0].strip()

    def _take(self, mark: str) -> bool:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        if not self._text.startswith(mark, self._at):
            return False
        self._at += len(mark)
        return True


def plain(text: str) -> str:
    """Returns the text without halves of surrogate pairs, which a model may escape and no wire takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def dumped(value: Any) -> str:
    """Returns the value as JSON text."""
    return plain(json.dumps(value, ensure_ascii=False, allow_nan=False))


def loaded(text: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError, and RecursionError if it is too deep."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def arguments_object(text: str) -> dict[str, Any]:
    """Returns a call's arguments. What is no object is the model's own mistake, which the client is to
    see."""
    try:
        given = loaded(dumped(loaded(text)))
    except (ValueError, RecursionError):
        given = None
    return given if isinstance(given, dict) else {"arguments": plain(text)}
