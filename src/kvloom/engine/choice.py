"""Which running request leaves a unit: low execution priority first, then short (Llumnix, section 4.4); and
whether one has a place elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvloom.cluster.freeness import after, freeness
from kvloom.types.load import ModelLoad, UnitLoad
from kvloom.types.request import Level

LEAST_LEFT: Final = 16  # tokens: two stages of a move take some steps, and a move is work for both sides


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request with all its choices. lengths: of each choice in tokens, the prompt included.
    left: tokens that the choice with most to do may still make, max_tokens and the longest context less what
    it has made; nobody knows whether a stop token comes before. level: of its execution priority. shared:
    tokens with which all choices begin, and which are held once for all of them."""

    request: str
    model: str
    lengths: tuple[int, ...]
    left: int
    level: Level | None = None
    shared: int = 0

    @property
    def tokens(self) -> int:
        """That are held for it."""
        return sum(self.lengths) - (len(self.lengths) - 1) * self.shared

    def blocks(self, model: ModelLoad) -> int:
        """That hold it where its model is as there. Pages are shared whole."""
        whole = self.shared - self.shared % model.page_tokens
        return sum(map(model.blocks, self.lengths)) - (len(self.lengths) - 1) * model.blocks(whole)


def choose(
    candidates: Iterable[Candidate],
    destination: UnitLoad,
    *,
    least_left: int = LEAST_LEFT,
    floor: float = 0.0,
) -> Candidate | None:
    """The request to move to `destination`; None where there is none. One that is about to end stays. So
    does one that would bring the destination's freeness below `floor`, in decode steps: 0 is where it just
    holds it, and the threshold of sources where it need not give it away at once. One that drains holds
    nothing."""
    best, rank = None, (math.inf, math.inf)
    for one in candidates:
        own = one.level.headroom if one.level else 0, one.tokens
        if own < rank and one.left >= least_left and has_room(destination, one, floor):
            best, rank = one, own
    return best


def has_room(destination: UnitLoad, one: Candidate, floor: float) -> bool:
    """Whether it keeps at least `floor` with this one."""
    model = destination.models.get(one.model)
    if model is None:
        return False
    there = after(destination, one.model, len(one.lengths), one.blocks(model), one.level)
    return freeness(there) >= floor
