"""The state of a sequence for which tokens are drafted."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from kvloom.engine.drafts.lengths import HOPELESS, Acceptance
from kvloom.engine.drafts.ngrams import NgramIndex, Tokens

_FIRST_BACKOFF: Final = 16  # steps
_LONGEST_BACKOFF: Final = 1024
_TRIAL: Final = 2  # tokens that a model drafts for a trial
_COMPARED: Final = 8  # drafts of n-grams that are compared with the tokens that come, if they are not tried
_LONGEST_MISS: Final = 7  # steps without a look after many looks that found nothing


@dataclass(slots=True)
class DraftState:
    """The drafts of one sequence. If they are wrong too often to pay, they back off: for so many steps
    nothing is drafted, and if drafts are wrong again then, the next backoff is twice as long.

    Drafts of n-grams that do not pay are not tried. The tokens that come show as well whether they would have
    been right. What a model drafts costs its steps, so that is only done for trials."""

    rates: list[Acceptance]
    """How often drafts were right, for each size of n-grams (`SIZES`); a single one if a model drafts."""
    index: NgramIndex | None = None
    """The n-grams of its text; None if a model drafts."""
    kind: int = 0
    """The index in `rates` of the size that drafted last; 0 if a model drafts."""
    draft_model_tokens: int = 0
    """Tokens of which the draft model had K and V, when it was last asked."""
    explores: bool = False
    """The draft model may compute a long prompt for the first trial."""
    has_paid: bool = False
    """Drafts have paid at some step, so that a model has less to compute for a trial later."""
    backoff_left: int = 0
    """Steps for which nothing is drafted yet."""
    backoff: int = _FIRST_BACKOFF
    """Steps of the next backoff."""
    misses: int = 0
    """Looks in a row that found no n-gram, up to `_LONGEST_MISS`."""
    trial_due: bool = False
    """Whether the next drafts of a model are tried even if they do not pay."""
    untried: tuple[int, list[int]] | None = None
    """Drafts of n-grams that were not tried, and the index of the token that the first one stands for."""

    @property
    def rate(self) -> float:
        """The probability that a token of the last drafts is right."""
        return self.rates[self.kind].rate

    def tick_backoff(self) -> bool:
        """Returns whether nothing is to be drafted for the step that comes, and counts it."""
        if not self.backoff_left:
            return False
        self.backoff_left -= 1
        return True

    def note_steps(self, steps: int) -> None:
        """Takes note of steps for which nothing was looked for."""
        self.backoff_left = max(0, self.backoff_left - steps)

    def note_look(self, found: int) -> None:
        """Takes note that a look for n-grams has found so many tokens. After each look that finds none, one
        step more goes by until the next, because looking takes time too."""
        self.misses = 0 if found else min(self.misses + 1, _LONGEST_MISS)
        self.backoff_left = max(self.backoff_left, self.misses)

    def leave_untried(self, drafted: list[int], at: int) -> None:
        """Takes note that drafts of n-grams do not pay. at: the index of the token that the first one stands
        for."""
        self.untried = at, drafted[:_COMPARED]
        if self.rate < HOPELESS:
            self._back_off()

    def compare(self, tokens: Tokens) -> tuple[int, int]:
        """Returns how many of the untried drafts would have been right, the first ones, and how many were
        there to be compared."""
        if self.untried is None:
            return 0, 0
        (at, drafted), self.untried = self.untried, None
        came = tokens.between(at, min(at + len(drafted), tokens.length)).tolist()
        same = takewhile(lambda both: both[0] == both[1], zip(drafted, came, strict=False))
        return sum(1 for _ in same), len(came)

    def note_unpaid(self, found: int, *, may_try: bool) -> int:
        """Takes note that of the `found` tokens that a model is to draft none pays. Returns how many are
        tried anyway. may_try: whether it is this sequence's turn.

        Likely drafts do not back off, because they may pay again in a smaller batch. They are tried when it
        is their turn, because only a trial updates the rate."""
        if self.trial_due:
            self.trial_due = not may_try
            return min(_TRIAL, found) if may_try else 0
        if self.rate < HOPELESS:
            self._back_off()
            self.trial_due = True
            return 0
        return min(_TRIAL, found) if may_try else 0

    def _back_off(self) -> None:
        self.backoff_left = self.backoff
        self.backoff = min(2 * self.backoff, _LONGEST_BACKOFF)

    def note_paid(self) -> None:
        """Takes note that drafted tokens pay."""
        self.has_paid = True
        if self.index is None:
            self.backoff = _FIRST_BACKOFF

    def note_verified(self, right: int, drafted: int) -> None:
        """Takes note of how many of the drafted tokens were right, or would have been: the first ones."""
        self.explores = False
        self.rates[self.kind].note(right, drafted)
        if right == drafted > 1 and self.index is not None:  # one alone may be chance
            self.backoff = _FIRST_BACKOFF
