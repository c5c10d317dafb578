"""Drafts out of a sequence's own text (prompt lookup decoding, Saxena 2023): if the last tokens stood in the
text before, the tokens that followed them there are likely to follow again."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np

from kvloom.types.geometry import I64

SIZES: Final = (4, 3, 2)
"""Tokens of an n-gram; the longest that is found is taken."""
_LEAST_BITS, _MOST_BITS = 8, 15  # of a table's places; a table of 2^15 takes 128 KiB
_AT_ONCE: Final = 32  # tokens from which on they are entered as arrays
_WORD: Final = (1 << 64) - 1
_FACTORS: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)  # odd
_VECTOR: Final = np.array(_FACTORS, np.uint64)


class Tokens(Protocol):
    """A sequence's tokens, which only grow; see `TokenBuffer`."""

    length: int

    def between(self, start: int, end: int) -> I64: ...


class NgramIndex:
    """Tells where the n-grams of one sequence stood last. Each size has a table of positions by hash, in
    which a later n-gram replaces an earlier one, so memory is bounded. Each n-gram that is found is compared
    with the text."""

    def __init__(self, most: int) -> None:
        """most: tokens that the sequence may come to have."""
        bits = min(max(2 * most, 1).bit_length(), _MOST_BITS)
        self._shift = 64 - max(bits, _LEAST_BITS)
        self._last = np.full((len(SIZES), 1 << (64 - self._shift)), -1, np.int32)
        self._entered = 0  # tokens at which an n-gram that is entered ends

    def draft(self, tokens: Tokens, most: int) -> tuple[list[int], int]:
        """Returns up to `most` tokens that may follow, and which of `SIZES` was found; no tokens if none was.
        A text that has begun to repeat itself is taken to go on so."""
        length = tokens.length
        self._enter(tokens, length - 1)
        last = tokens.between(max(0, length - SIZES[0]), length).tolist()
        for kind, size in enumerate(SIZES):
            if size >= length:
                continue
            end = int(self._last[kind, self._place(last[-size:])]) + 1
            if end >= size and tokens.between(end - size, end).tolist() == last[-size:]:
                drafted: list[int] = tokens.between(end, min(end + most, length)).tolist()
                while len(drafted) < most:
                    drafted.append(drafted[end - length])
                return drafted, kind
        return [], 0

    def _enter(self, tokens: Tokens, end: int) -> None:
        """Enters the n-grams that end before token `end` and are not entered yet."""
        begin, self._entered = self._entered, max(end, self._entered)
        if begin >= end:
            return
        first = max(0, begin - SIZES[0] + 1)
        text = tokens.between(first, end)
        if end - begin >= _AT_ONCE:
            self._enter_at_once(text, first, begin)
            return
        known = text.tolist()
        for at in range(begin, end):
            for kind, size in enumerate(SIZES):
                if at + 1 >= size:
                    self._last[kind, self._place(known[at + 1 - size - first : at + 1 - first])] = at

    def _enter_at_once(self, known: I64, first: int, begin: int) -> None:
        """Does the same for a long text, from token `first` of the sequence on."""
        text = known.astype(np.uint64)
        for kind, size in enumerate(SIZES):
            if len(text) < size:
                continue
            products = np.lib.stride_tricks.sliding_window_view(text, size) * _VECTOR[:size]
            places = (products.sum(1, dtype=np.uint64) >> np.uint64(self._shift)).astype(np.int64)
            ends = np.arange(first + size - 1, first + len(text))
            new = ends >= begin
            self._last[kind, places[new]] = ends[new]  # of equal places the last one counts

    def _place(self, ngram: list[int]) -> int:
        return (sum(map(int.__mul__, ngram, _FACTORS)) & _WORD) >> self._shift
