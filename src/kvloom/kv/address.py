"""Where in a receiver's arena a run of tokens goes, as it crosses the verbs."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct


class KVAddress(Struct, frozen=True, array_like=True):
    """Token slots of one model at the receiver, run-length compressed.

    runs: (first slot, length) pairs; slot = page · tokens_per_block + offset. Lengths sum to the tokens.
    """

    model: str
    tokens_per_block: int
    runs: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        return sum(length for _, length in self.runs)

    def slots(self) -> Iterator[int]:
        for first, length in self.runs:
            yield from range(first, first + length)

    def skip(self, tokens: int) -> KVAddress:
        """The address without its first `tokens` tokens; itself where that is none."""
        runs: list[tuple[int, int]] = []
        for first, length in self.runs:
            gone = min(max(tokens, 0), length)
            tokens -= gone
            if length > gone:
                runs.append((first + gone, length - gone))
        return KVAddress(self.model, self.tokens_per_block, tuple(runs))

    @staticmethod
    def compress(model: str, tokens_per_block: int, slots: list[int]) -> KVAddress:
        """The shortest run list for `slots`, in order."""
        runs: list[tuple[int, int]] = []
        for slot in slots:
            if runs and runs[-1][0] + runs[-1][1] == slot:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((slot, 1))
        return KVAddress(model, tokens_per_block, tuple(runs))
