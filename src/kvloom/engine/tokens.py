"""A sequence's tokens: a prompt, which the choices of a request share, and an output that grows."""

from __future__ import annotations

from collections import abc

import numpy as np

from kvloom.core.arrays import I64

_ROOM = 16


class Tokens:
    """Only ever grows, and never in place of a token that was there. So `prompt`, `output` and slices are
    views that stay true whatever is appended later, and that a job's thread may read meanwhile.

    asked, made: tokens of the prompt and of the output; length: of both.
    """

    __slots__ = ("_room", "asked", "length", "made", "prompt")

    def __init__(self, prompt: I64, output: abc.Sequence[int] = ()) -> None:
        self.prompt = prompt
        self.asked = int(prompt.size)
        self.made = len(output)
        self.length = self.asked + self.made
        self._room = np.array(output, dtype=np.int64)

    @property
    def output(self) -> I64:
        return self._room[: self.made]

    def append(self, token: int) -> None:
        if self.made == self._room.size:
            self._grow(1)
        self._room[self.made] = token
        self._made(1)

    def extend(self, tokens: abc.Sequence[int]) -> None:
        if self.made + len(tokens) > self._room.size:
            self._grow(len(tokens))
        self._room[self.made : self.made + len(tokens)] = tokens
        self._made(len(tokens))

    def _made(self, count: int) -> None:
        self.made += count
        self.length += count

    def _grow(self, count: int) -> None:
        room = np.empty(max(_ROOM, 2 * (self.made + count - 1)), dtype=np.int64)
        room[: self.made] = self._room[: self.made]
        self._room = room

    def list(self) -> list[int]:
        """All, copied."""
        return [*self.prompt.tolist(), *self.output.tolist()]

    def between(self, start: int, end: int) -> I64:
        """Tokens [start, end), counted from the prompt's first."""
        length = self.asked
        if start >= length:
            return self._room[start - length : end - length]
        if end <= length:
            return self.prompt[start:end]
        return np.concatenate((self.prompt[start:], self._room[: end - length]))
