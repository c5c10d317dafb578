"""Decides how many tokens are drafted for each sequence: as many as pay. That follows from how often drafts
were right of late, and from the seconds that steps of more rows took.

A verification of k drafts, each right with probability a if those before it are, gives on average
(1 - a^(k+1)) / (1 - a) tokens (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
ICML 2023, section 3.1); it costs a step of k more rows, and if a model drafts, k steps of the draft model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from statistics import median
from typing import Final

from kvloom.engine.batching.job_times import WEIGHT_READ_TOKENS

LEAST_GAIN: Final = 1.03  # the least speed-up for which drafts are taken
SURE: Final = 0.98  # the highest acceptance rate that is assumed
HOPELESS: Final = 0.3  # the rate below which drafts that do not pay back off
_KNOWN: Final = 4.0  # tried tokens from which on a rate is more than an assumption
_WINDOW: Final = 8  # the last steps of so many rows that count
_OLD: Final = 256  # steps after which what was seen counts no more
_MOST_LOST: Final = 0.01  # the part of the time of steps without drafts that is credited to the budget
_MOST_SAVED: Final = 8.0  # what the budget holds at first and at most, in steps without drafts


@dataclass(slots=True)
class Acceptance:
    """The recent rate at which drafted tokens were right; each token counts for less as others come. At first
    it is a prior of one half, with the weight of two tokens."""

    right: float = 1.0
    tried: float = 2.0

    def note(self, right: int, drafted: int) -> None:
        """Notes that of so many tokens in a row the first ones were right. Those after a wrong one say
        nothing."""
        self.right = 0.9 * self.right + right
        self.tried = 0.9 * self.tried + min(right + 1, drafted)

    @property
    def rate(self) -> float:
        """The probability that the next drafted token is right if those before it are."""
        return min(SURE, self.right / self.tried)

    @property
    def likely(self) -> bool:
        """Whether it is known, and not only assumed, that drafts are right often enough to be looked for."""
        return self.tried >= _KNOWN and self.rate >= HOPELESS

    def prior(self) -> Acceptance:
        """Returns the same rate with the weight of two tokens, as the prior of a new sequence."""
        return Acceptance(2 * self.right / self.tried, 2.0)


class StepTimes:
    """Estimates the seconds of a decode step from recent steps of about as many rows.

    Drafts are decided by the shortest of these: what else the machine does makes steps longer, and by a mean
    or a median drafts would begin when the last steps without them happened to be long. What drafts have
    cost is judged by the median, because a step with drafts is longer by chance as often as one without."""

    def __init__(self) -> None:
        self._last: dict[int, deque[tuple[int, float]]] = {}  # by rows: the number of a step, and its seconds
        self._steps = 0

    def note(self, rows: int, seconds: float) -> None:
        """Notes one more step."""
        self._steps += 1
        self._last.setdefault(rows, deque(maxlen=_WINDOW)).append((self._steps, seconds))

    def expected(self, least: int, most: int, unseen: float = 1.0) -> list[float]:
        """Returns the shortest seconds of a step of each number of rows from `least` to `most`. One that was
        not seen of late is scaled from the nearest that was, by its rows beside `WEIGHT_READ_TOKENS`. unseen:
        what a step of `least` rows takes if none was seen; if it is left out, only the ratios of the numbers
        mean something then."""
        return self._scaled(least, most, unseen, min)

    def typical(self, rows: int, unseen: float) -> float:
        """Returns the median seconds of a step of so many rows, scaled as `expected` does."""
        return self._scaled(rows, rows, unseen, median)[0]

    def _scaled(
        self, least: int, most: int, unseen: float, of: Callable[[Iterable[float]], float]
    ) -> list[float]:
        since, known = self._steps - _OLD, dict[int, list[float]]()
        for rows, last in self._last.items():
            if last[-1][0] >= since:
                known[rows] = [seconds for step, seconds in last if step >= since]
        if not known:
            known = {least: [unseen]}
        seen, at = sorted(known), 0
        found, each = list[float](), 0.0
        for rows in range(least, most + 1):
            while at + 1 < len(seen) and seen[at + 1] - rows <= abs(rows - seen[at]):
                at += 1
                each = 0.0
            each = each or of(known[seen[at]]) / (WEIGHT_READ_TOKENS + seen[at])
            found.append(each * (WEIGHT_READ_TOKENS + rows))
        return found


class LossBudget:
    """Bounds what drafts cost beyond what they bring, whatever is expected of them: `_MOST_LOST` of the time
    of the decode steps, counted in steps without drafts."""

    def __init__(self) -> None:
        self._left = _MOST_SAVED

    @property
    def spent(self) -> bool:
        """Whether nothing may be drafted until more steps without drafts have been made."""
        return self._left <= 0.0

    def earn(self, steps: int) -> None:
        """Notes steps without drafts."""
        self._left = min(_MOST_SAVED, self._left + _MOST_LOST * steps)

    def note(self, took: float, made: float) -> None:
        """Notes a step with drafts. took: its time, as a multiple of a step's without; made: its tokens, as a
        multiple of such a step's. A loss counts as `_MOST_SAVED` at most, because the machine may have
        stood still."""
        self._left = min(_MOST_SAVED, self._left - min(_MOST_SAVED, took - made))


def best_lengths(
    candidates: Sequence[tuple[float, int]],
    seconds: Sequence[float],
    drawn: int,
    draft_seconds: float = 0.0,
) -> list[int]:
    """Returns how many tokens of each candidate a step takes so that most tokens a second come of it; none if
    that is less than `LEAST_GAIN` times what there is without.

    candidates: each with the probability that a token of it is right, and its tokens. seconds: of a step with
    so many drafted tokens, from 0 on; no more are taken than it tells of. drawn: tokens that the step makes
    without drafts, one for each sequence. draft_seconds: of one step of the draft model, which drafts one
    token for every candidate; there are as many such steps as the longest length that is taken.
    """
    taken, best = [0] * len(candidates), [0] * len(candidates)
    # The heap holds the negative probability a^j that a candidate's next token, its j-th, is accepted. Their
    # sum is the formula at the top of this file.
    heap = list[tuple[float, int]]()
    for i, (rate, count) in enumerate(candidates):
        if count:
            heappush(heap, (-rate, i))
    tokens, best_pace = float(drawn), LEAST_GAIN * drawn / seconds[0]
    for took in seconds[1:]:
        if not heap:
            break
        negative, i = heappop(heap)
        taken[i] += 1
        tokens -= negative
        if taken[i] < candidates[i][1]:
            heappush(heap, (negative * candidates[i][0], i))
        pace = tokens / (took + draft_seconds * max(taken))
        if pace > best_pace:
            best, best_pace = list(taken), pace
    return best
