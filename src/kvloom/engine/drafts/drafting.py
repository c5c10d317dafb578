"""What is known of a sequence for which tokens are drafted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvloom.engine.drafts.lengths import Acceptance
from kvloom.engine.drafts.ngrams import NgramIndex

_FIRST_PAUSE: Final = 16  # steps
_LONGEST_PAUSE: Final = 1024
_LONGEST_IF_LIKELY: Final = 128  # steps between two trials of drafts that are likely, but do not pay
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
    has_paid: bool = False
    """Drafts have paid at some step, so that a model may try again when they do not any more."""
    pause: int = 0
    """Steps that are left of a pause."""
    next_pause: int = _FIRST_PAUSE
    """Steps of the next pause."""
    refusals: int = 0
    """Steps in which likely drafts did not pay, since the last trial."""
    trial_due: bool = False
    """What is drafted next is tried, whether it pays or not."""

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

    def passed(self, steps: int) -> None:
        """Takes note of steps for which nothing was looked for."""
        self.pause = max(0, self.pause - steps)
        self.refusals += steps

    def refused(self, found: int) -> int:
        """Takes note that of the `found` tokens that are drafted none pays. Returns how many are tried
        anyway. Likely ones of a model, whose steps cost, do not pause, because they may pay beside fewer
        others; but they are tried after as many steps, because only that tells how likely they are by now."""
        if self.trial_due:
            self.trial_due = False
            return min(_TRIAL, found)
        if self.rate < _HOPELESS:
            self.pause, self.trial_due = self.next_pause, True
            self.next_pause = min(2 * self.next_pause, _LONGEST_PAUSE)
        elif self.index is None:
            self.refusals += 1
            if self.refusals >= self.next_pause:
                self.refusals, self.trial_due = 0, True
                self.next_pause = min(2 * self.next_pause, _LONGEST_IF_LIKELY)
        return 0

    def paid(self) -> None:
        """Takes note that drafted tokens pay."""
        self.has_paid = True
        if self.index is None:
            self.next_pause = _FIRST_PAUSE

    def verified(self, right: int, drafted: int) -> None:
        """Takes note that of the drafted tokens the first ones were right."""
        self.explores = False
        self.rates[self.kind].note(right, drafted)
        if right == drafted and self.index is not None:
            self.next_pause = _FIRST_PAUSE
