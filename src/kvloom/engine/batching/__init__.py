"""Batching policies: pure functions from a frozen view of the unit to the next action, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvloom.engine.batching.adbs import adbs
from kvloom.engine.batching.baselines import adbs_2024, fcfs, partitioned, round_robin, vllm_2023
from kvloom.engine.batching.slack import slack
from kvloom.engine.batching.view import Action, UnitView, last_resort

Policy = Callable[[UnitView], Action | None]


def _with_last_resort(policy: Policy) -> Policy:
    """Returns the policy. If the policy says nothing and nothing runs, `last_resort` answers in its place."""
    return lambda view: policy(view) or last_resort(view)


POLICIES: dict[str, Policy] = {
    "adbs": _with_last_resort(adbs),
    "fcfs": _with_last_resort(fcfs),
    "round-robin": _with_last_resort(round_robin),
    "partitioned": _with_last_resort(partitioned),
    "slack": _with_last_resort(slack),
    "vllm-2023": _with_last_resort(vllm_2023),
    "adbs-2024": _with_last_resort(adbs_2024),
}
BY_DEADLINES: Final = frozenset({"slack"})  # policies whose answer changes as time goes by
IN_ORDER: Final = frozenset({"vllm-2023"})  # policies under which nobody leaves the queue but for the device
