"""A job as a cost model sees it, and what a cost model is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvloom.core.arrays import I64
from kvloom.core.job import Phase


@dataclass(frozen=True, slots=True)
class Work:
    """One job of one model.

    share: of the unit's compute, in (0, 1]. batch: sequences. tokens: computed by it, over all sequences.
    drawn: tokens whose logits are needed. pairs: (query, key) pairs that attention looks at. context: cached
    tokens that it reads, over all sequences.
    """

    model: str
    phase: Phase
    share: float
    batch: int
    tokens: int
    drawn: int
    pairs: int
    context: int

    @staticmethod
    def of(model: str, phase: Phase, share: float, appends: I64, starts: I64, drawn: int) -> Work:
        """appends, starts: [B] tokens that each sequence computes, and has already."""
        tokens, context = int(appends.sum()), int(starts.sum())
        pairs = int(appends @ starts) + int(appends @ (appends + 1)) // 2
        return Work(model, phase, share, appends.size, tokens, drawn, pairs, context)

    def next(self) -> Work:
        """The step that follows this decode step."""
        return Work(
            self.model,
            self.phase,
            self.share,
            self.batch,
            self.tokens,
            self.drawn,
            self.pairs + self.batch,
            self.context + self.batch,
        )

    @staticmethod
    def prefill(model: str, share: float, lengths: Sequence[int]) -> Work:
        """Whole prompts of these lengths at once."""
        pairs = sum(n * (n + 1) // 2 for n in lengths)
        return Work(model, Phase.PREFILL, share, len(lengths), sum(lengths), len(lengths), pairs, 0)

    @staticmethod
    def decode(model: str, share: float, contexts: Sequence[int]) -> Work:
        """A step of sequences that hold so many tokens."""
        batch, held = len(contexts), sum(contexts)
        return Work(model, Phase.DECODE, share, batch, batch, batch, held + batch, held)


class CostModel(Protocol):
    """Says for one unit, that is for a group of devices and the models on it, how long jobs take."""

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        """From launch to result, if all of `beside` ran at the same time from its first moment to its last.
        Raises ConfigError for a model that it does not know."""
