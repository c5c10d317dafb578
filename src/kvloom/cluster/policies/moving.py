"""Decides whether K and V that one unit has are copied to another one, or computed there again: whichever is
quicker by the rate of the link between them and by the speed at which the other one prefills. A stream that
runs is also copied if that takes up to twice as long, because it goes on meanwhile."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, Literal

from kvloom.types.load import UnitLoad

Moved = Literal["request", "context", "prefix"]
"""The kind of thing that is to be moved: a running request, the context of one that arrives, or a prefix of
many."""

Reason = Literal["unmeasured", "copying", "computing", "neither"]
"""Why it is done how it is done. `unmeasured`: it is copied, because the link or the speed is not known.
`copying`: it is copied, because that is quicker, or for a stream at most twice as slow. `computing`: it is
computed again, because that is quicker. `neither`: the request stays where it is, because copying is slow,
and computing would stop its stream for too long."""

LONGEST_PAUSE: Final = 1.0  # seconds for which a stream may stand still while its context is computed again


@dataclass(frozen=True, slots=True)
class MoveTerms:
    """Holds what decides. A rate or a speed of 0 is not known."""

    token_bytes: float
    """Bytes of K and V that a token takes."""
    rate: float
    """Bytes a second that go from the source to the destination."""
    speed: float
    """Tokens a second that the destination prefills."""

    @staticmethod
    def of(model: str, source: UnitLoad | None, destination: str, there: UnitLoad | None) -> MoveTerms:
        """Returns the terms of a model between two units, by their loads; None is one that is not known.
        destination: the other unit's name."""
        here, other = (load.model(model) if load else None for load in (source, there))
        link = source.links.get(destination) if source else None
        if source is None or here is None or other is None or link is None:
            return MoveTerms(0.0, 0.0, 0.0)
        return MoveTerms(here.token_blocks * source.block_bytes, link.rate, other.prefill_speed)

    def judge(self, tokens: int, most: float | None = None) -> Reason:
        """Returns how `tokens` tokens get to the destination. most: for a stream that runs, the seconds for
        which it may stand still. It stands still while its context is computed again, and goes on while it is
        copied; so that time counts twice for a stream, once as work and once as the pause."""
        if not (self.token_bytes and self.rate and self.speed):
            return "unmeasured"
        copying, computing = tokens * self.token_bytes / self.rate, tokens / self.speed
        if most is None:
            return "copying" if copying <= computing else "computing"
        if copying <= 2 * computing:
            return "copying"
        return "computing" if computing <= most else "neither"


class MoveCounts:
    """Counts what was decided, by what was to be moved and by the reason."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[Moved, Reason]] = Counter()

    def judge(self, what: Moved, terms: MoveTerms, tokens: int, most: float | None = None) -> Reason:
        """Does as `MoveTerms.judge`, and counts it."""
        reason = terms.judge(tokens, most)
        self.counts[what, reason] += 1
        return reason
