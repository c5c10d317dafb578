"""Server-sent events, counted as they come; only the last one is read."""

from __future__ import annotations

from typing import Any, Final

import msgspec

_DATA, _DONE = b"data:", b"[DONE]"
LONGEST_ERROR: Final = 200


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens_details: Details | None = None


class Chunk(msgspec.Struct):
    """What of a completion's chunk, or of an error's body, is of interest. Servers differ in how they say
    errors."""

    choices: list[msgspec.Raw] = []
    usage: Usage | None = None
    error: Any = None
    message: str | None = None

    @property
    def problem(self) -> str:
        """One line; empty where there is none."""
        found = self.error.get("message", self.error) if isinstance(self.error, dict) else self.error
        return " ".join(str(found or self.message or "").split())[:LONGEST_ERROR]


read_chunk = msgspec.json.Decoder(Chunk).decode


class Events:
    """count: events so far. last: the latest one's data, [DONE] aside. done: whether that has come."""

    def __init__(self) -> None:
        self.count = 0
        self.last = b""
        self.done = False
        self._rest = b""

    def feed(self, data: bytes) -> None:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(_DATA):
                content = line[len(_DATA) :].strip()
                if content == _DONE:
                    self.done = True
                else:
                    self.count += 1
                    self.last = content
