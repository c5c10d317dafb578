"""Values in a model's text: finds the end of a JSON value, and reads values that are almost JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final


class JsonEnd:
    """Finds the place at which the first bracketed JSON value ends, and looks at each character once. After a
    name, as Mistral writes it, only a brace begins the value."""

    def __init__(self, depth: int = 0) -> None:
        """depth: brackets that are open already."""
        self.quoted = False
        """Whether a string is open."""
        self._depth = depth
        self._named = False
        self._escaped = False

    def __call__(self, text: str) -> int | None:
        """Returns the place after the value's end, or None if it goes on."""
        for at, letter in enumerate(text):
            if self.quoted:
                self._in_string(letter)
            elif self._depth == 0:
                self._before(letter)
            elif letter == '"':
                self.quoted = True
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
            self.quoted = False

    def _before(self, letter: str) -> None:
        if letter == "{" or (letter == "[" and not self._named):
            self._depth = 1
        elif not letter.isspace():
            self._named = True


class StringRest:
    """Tells of text that follows a mark in an open string whether the string goes on there: then what follows
    its closing quote can follow a string in JSON. It looks at each character once."""

    def __init__(self) -> None:
        self.length = 0
        """The characters up to what follows the string, if it goes on."""
        self._escaped = self._closed = False

    def __call__(self, text: str) -> bool | None:
        """Takes more of the text. Returns None if that does not tell yet."""
        for letter in text:
            if self._closed and not letter.isspace():
                return letter in ",:}]"
            self.length += 1
            self._closed = self._closed or (letter == '"' and not self._escaped)
            self._escaped = letter == "\\" and not self._escaped
        return None


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
        return plain(value["name"]), plain(arguments)
    if not isinstance(arguments, dict):
        return None
    return plain(value["name"]), dumped(arguments)


_BARE: Final = re.compile(r"\s*+call:(?P<name>[\w.:-]++)(?=\{)")


def bare_call(inner: str, quote: str) -> list[tuple[str, str]] | None:
    """Returns the name and the arguments of a call as Gemma writes it, or None if it is none. Raises
    ValueError."""
    found = _BARE.match(inner)
    if found is None:
        return None
    return [(found["name"], dumped(BareValue(inner[found.end() :], quote).read()))]


_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}


def typed(text: str, schema: Mapping[str, Any], key: str) -> str:
    """Returns a parameter's text as JSON: a string if its schema says so, else the value that it reads as.
    Templates may write a past call's values as Python does, and models after them; if the schema has another
    type than a string, these are read, too."""
    parameters = schema.get("properties")
    one = parameters.get(key) if isinstance(parameters, dict) else None
    kind = one.get("type") if isinstance(one, dict) else None
    if kind != "string":
        try:
            return dumped(loaded(text))
        except (ValueError, RecursionError):
            pass
    kinds = kind if isinstance(kind, list) else [kind]
    read_as_python = kind is not None and "string" not in kinds
    return _PYTHON.get(text.strip(), dumped(text)) if read_as_python else dumped(text)
