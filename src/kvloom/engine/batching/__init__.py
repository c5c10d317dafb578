"""Batching policies: pure functions from a frozen view of the unit to the next action, or none."""

from __future__ import annotations

from collections.abc import Callable

from kvloom.engine.batching.adbs import adbs
from kvloom.engine.batching.fcfs import fcfs
from kvloom.engine.batching.partitioned import partitioned
from kvloom.engine.batching.progress import last_resort
from kvloom.engine.batching.round_robin import round_robin
from kvloom.engine.batching.view import Action, UnitView

Policy = Callable[[UnitView], Action | None]


def _moving(policy: Policy) -> Policy:
    return lambda view: policy(view) or last_resort(view)


POLICIES: dict[str, Policy] = {
    "adbs": _moving(adbs),
    "fcfs": _moving(fcfs),
    "round-robin": _moving(round_robin),
    "partitioned": _moving(partitioned),
}
