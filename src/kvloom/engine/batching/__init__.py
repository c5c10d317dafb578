"""Batching policies: pure functions from a frozen view of the unit to the next action, or none."""

from __future__ import annotations

from collections.abc import Callable

from kvloom.engine.batching.adbs import adbs
from kvloom.engine.batching.fcfs import fcfs
from kvloom.engine.batching.round_robin import round_robin
from kvloom.engine.batching.view import Action, UnitView

Policy = Callable[[UnitView], Action | None]

POLICIES: dict[str, Policy] = {"adbs": adbs, "fcfs": fcfs, "round-robin": round_robin}
