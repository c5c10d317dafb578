"""Batching policies: pure functions from a frozen view of the unit to the next action, or none."""

from __future__ import annotations

from collections.abc import Callable

from kvloom.engine.batching.adbs import adbs
from kvloom.engine.batching.baselines import fcfs, partitioned, round_robin
from kvloom.engine.batching.view import Action, UnitView, last_resort

Policy = Callable[[UnitView], Action | None]


def _moving(policy: Policy) -> Policy:
    return lambda view: policy(view) or last_resort(view)


POLICIES: dict[str, Policy] = {
    "adbs": _moving(adbs),
    "fcfs": _moving(fcfs),
    "round-robin": _moving(round_robin),
    "partitioned": _moving(partitioned),
}
