"""To which unit a new request goes, of those that serve its model.

Ties are broken by turn: who was chosen longest ago, the smallest number, is next. A unit that drains is never
chosen; None where all do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from kvloom.cluster.freeness import Arrival, wanted
from kvloom.types.load import UnitLoad

_NO_ROOM: Final = sys.maxsize  # more headroom than any has: after all that hold the request

Unit = TypeVar("Unit")
Dispatch = Callable[[Mapping[Unit, UnitLoad], Mapping[Unit, int], Arrival], Unit | None]


def freest(loads: Mapping[Unit, UnitLoad], turns: Mapping[Unit, int], arrival: Arrival) -> Unit | None:
    """Of those that hold the request, to one where its level brings least headroom; of these, to the one that
    has most freeness once it runs there. Llumnix (section 4.4) looks at freeness alone, and before. But where
    others of a level run its headroom is there already, so they gather, until it finds no room beside their
    load. A request of no level brings none anywhere. Where nobody holds it, it waits behind all that wait
    there, of which freeness counts the first alone: so to the one that lacks least for all of them."""

    def cost(load: UnitLoad) -> tuple[int, float]:
        left = arrival.freeness(load)
        return (arrival.headroom(load), -left) if left >= 0 else (_NO_ROOM, arrival.lacks(load))

    return _least(loads, turns, cost)


def infaas(loads: Mapping[Unit, UnitLoad], turns: Mapping[Unit, int], arrival: Arrival) -> Unit | None:
    """INFaaS++: to the one with least of its memory in use, all that waits counted as if it ran (Llumnix,
    section 6.1)."""
    return _least(loads, turns, lambda load: (0, wanted(load) / load.total_blocks))


def _least(
    loads: Mapping[Unit, UnitLoad], turns: Mapping[Unit, int], cost: Callable[[UnitLoad], tuple[int, float]]
) -> Unit | None:
    open_ = [(cost(load), turns[unit], unit) for unit, load in loads.items() if not load.draining]
    return min(open_, key=lambda one: one[:2])[2] if open_ else None
