"""What is known of a sequence for which tokens are drafted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvloom.engine.drafts.lengths import Acceptance
from kvloom.engine.drafts.ngrams import NgramIndex

_FIRST_PAUSE: Final = 16  # steps
_LONGEST_PAUSE: Final = 1024
_LONGEST_IF_LIKELY: Final = 128  # if drafts are not hopeless, but do not pay beside so many others
_TRIAL: Final = 2  # tokens that are drafted after a pause, whether they pay or not
_HOPELESS: Final = 0.3  # the rate below which drafts pause that do not pay; others wait for fewer rows


@dataclass(slots=True)
class Drafting:
    """The drafts of one sequence. Where they do not pay, they pause for so many steps, then there is a trial
    of a few tokens, and if those are wrong the next pause is twice as long."""

    rates: list[Acceptance]
    """By the size of the n-gram; a single one if a model drafts."""
    index: NgramIndex | None = None
    """The n-grams of its text; None if a model drafts."""
    kind: int = 0
    """The index in `rates` of what drafted last."""
    followed: int = 0
    """Tokens of which the model that drafts had K and V, when it was last asked."""
    explores: bool = False
    """The model that drafts may compute a long prompt for the first trial."""
    pause: int = 0
    """Steps that are left of a pause."""
    next_pause: int = _FIRST_PAUSE
    """Steps of the next pause."""
    trial_due: bool = False
    """It has paused, and what is drafted next is tried."""

    @property
    def rate(self) -> float:
        """The probability that a token of the last drafts is right."""
        return self.rates[self.kind].rate

    def pauses(self) -> bool:
        """Returns whether nothing is to be drafted for the step that comes, and counts it."""
        if not self.pause:
            return False
        self.pause -= 1
        return True

    def refused(self, found: int) -> int:
        """Takes note that of the `found` tokens that are drafted none pays. Returns how many are tried
        anyway. Of a model, whose steps cost, even likely ones may not pay, and only a trial tells if they do
        again."""
        if self.trial_due:
            self.trial_due = False
            return min(_TRIAL, found)
        hopeless = self.rate < _HOPELESS
        if hopeless or self.index is None:
            self.pause, self.trial_due = self.next_pause, True
            self.next_pause = min(2 * self.next_pause, _LONGEST_PAUSE if hopeless else _LONGEST_IF_LIKELY)
        return 0

    def paid(self) -> None:
        """Takes note that drafted tokens pay."""
        if self.index is None:
            self.next_pause = _FIRST_PAUSE

    def verified(self, right: int, drafted: int) -> None:
        """Takes note that of the drafted tokens the first ones were right."""
        self.explores = False
        self.rates[self.kind].note(right, drafted)
        if right == drafted and self.index is not None:
            self.next_pause = _FIRST_PAUSE
