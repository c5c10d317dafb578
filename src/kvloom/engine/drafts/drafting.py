"""What is known of a sequence for which tokens are drafted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from kvloom.engine.drafts.lengths import Acceptance
from kvloom.engine.drafts.ngrams import SIZES, NgramIndex

_FIRST_REST, _LONGEST_REST = 16, 1024  # steps
_TRIED: Final = 2  # tokens, after a rest
_HOPELESS: Final = 0.3  # the rate below which drafts rest that do not pay; others wait for fewer rows


def first_rates() -> list[Acceptance]:
    """Returns what is expected of n-grams of each size before any was tried."""
    return [Acceptance() for _ in SIZES]


@dataclass(slots=True)
class Drafting:
    """The drafts of one sequence. Where they do not pay, they rest for so many steps, then a few tokens are
    tried, and if those are wrong the next rest is twice as long."""

    index: NgramIndex
    rates: list[Acceptance] = field(default_factory=first_rates)
    """By the size of the n-gram."""
    kind: int = 0
    """The index in `SIZES` of the n-gram that was found last."""
    resting: int = 0
    """Steps for which nothing is looked up any more."""
    rest: int = _FIRST_REST
    """Steps of the next rest."""
    tries: bool = False
    """It has rested, and what is found next is tried."""

    @property
    def rate(self) -> float:
        """The probability that a token of the last drafts is right."""
        return self.rates[self.kind].rate

    def refused(self, found: int) -> int:
        """Takes note that of the `found` tokens that are drafted none pays. Returns how many are tried
        anyway."""
        if self.tries:
            self.tries = False
            return min(_TRIED, found)
        if self.rate < _HOPELESS:
            self.resting, self.tries = self.rest, True
            self.rest = min(2 * self.rest, _LONGEST_REST)
        return 0

    def verified(self, right: int, drafted: int) -> None:
        """Takes note that of the drafted tokens the first ones were right."""
        self.rates[self.kind].note(right, drafted)
        if right == drafted:
            self.rest = _FIRST_REST
