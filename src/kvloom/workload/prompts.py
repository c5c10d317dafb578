"""The tokens of a workload's prompts: a function of the request alone, in simulation and on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvloom.workload.ask import Ask
from kvloom.workload.mixing import GOLDEN, mix, mixed

LOWEST: Final = 16  # special tokens mostly lie below
_OWN, _SHARED = 1, 2
_TEXT: Final = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but "
    "what all were when we there can an your which their said if do will each about how up out them then she "
    "many some so these would other into has more her two like him see time could no make than first been"
)
_WORDS: Final = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids from LOWEST to `vocab` - 1. The same segment id begins with the same tokens in every prompt;
    what is a request's own differs from request to request."""

    vocab: int
    seed: int = 0

    def __call__(self, number: int, ask: Ask) -> list[int]:
        """The `ask.prompt` tokens of request `number`."""
        runs = [(mix(self._key(_SHARED) + segment.id), segment.tokens) for segment in ask.shared]
        own = ask.prompt - sum(tokens for _, tokens in runs)
        runs.append((mix(self._key(_OWN) + number), own))
        counts = np.array([tokens for _, tokens in runs])
        keys = np.repeat(np.array([key for key, _ in runs], dtype=np.uint64), counts)
        places = np.arange(ask.prompt) - np.repeat(np.cumsum(counts) - counts, counts)
        drawn = mixed(keys + places.astype(np.uint64) * np.uint64(GOLDEN))
        tokens: list[int] = (drawn % np.uint64(self.vocab - LOWEST) + np.uint64(LOWEST)).tolist()
        return tokens

    def text(self, number: int, ask: Ask) -> str:
        """As many common English words, for servers that take no token ids: about as many tokens."""
        return " ".join(_WORDS[token % len(_WORDS)] for token in self(number, ask))

    def _key(self, kind: int) -> int:
        return mix(self.seed * 4 + kind)
