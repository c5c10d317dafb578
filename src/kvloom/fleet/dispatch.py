"""To which unit a new request goes, of those that serve its model.

Ties are broken by turn: who was chosen longest ago, the smallest number, is next. A unit that drains is never
chosen; None where all do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from kvloom.core.load import UnitLoad
from kvloom.fleet.freeness import freeness
from kvloom.fleet.placing import Arrival
from kvloom.fleet.usage import wanted

Unit = TypeVar("Unit")
Dispatch = Callable[[Mapping[Unit, UnitLoad], Mapping[Unit, int], Arrival], Unit | None]


def freest(loads: Mapping[Unit, UnitLoad], turns: Mapping[Unit, int], arrival: Arrival) -> Unit | None:
    """To the one that has most freeness once the request runs there. Llumnix (section 4.4) looks at freeness
    before; the difference is the headroom of the request's own level. That is there already where others of
    its level run, so they gather, and where none runs it would come with it. For all others it is there in
    any case, and they keep away."""
    return _least(loads, turns, lambda load: -freeness(arrival.placed(load)))


def round_robin(loads: Mapping[Unit, UnitLoad], turns: Mapping[Unit, int], arrival: Arrival) -> Unit | None:
    return _least(loads, turns, lambda load: 0.0)


def infaas(loads: Mapping[Unit, UnitLoad], turns: Mapping[Unit, int], arrival: Arrival) -> Unit | None:
    """INFaaS++: to the one with least of its memory in use, all that waits counted as if it ran (Llumnix,
    section 6.1)."""
    return _least(loads, turns, lambda load: wanted(load) / load.total_blocks)


def _least(
    loads: Mapping[Unit, UnitLoad], turns: Mapping[Unit, int], cost: Callable[[UnitLoad], float]
) -> Unit | None:
    open_ = [(cost(load), turns[unit], unit) for unit, load in loads.items() if not load.draining]
    return min(open_, key=lambda one: one[:2])[2] if open_ else None
