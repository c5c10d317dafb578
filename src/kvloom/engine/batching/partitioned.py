"""Models side by side, each on a share of the compute that is its own, as servers of one model each would run
on parts of a device: a model's prefill and decode never run beside each other. No quotas."""

from __future__ import annotations

from kvloom.engine.batching.turn import turn, waiting_turns
from kvloom.engine.batching.view import Action, Preempt, UnitView


def partitioned(view: UnitView) -> Action | None:
    """Shares are equal where none are planned, and at least one unit of compute: where those are too few for
    all models, they run by turns."""
    room, equal = view.idle + view.overload, max(1, view.compute // len(view.models))
    for model in waiting_turns(view):
        action = turn(view, model, model.prefill_share or equal, model.decode_share or equal)
        if action:
            return action if isinstance(action, Preempt) or action.share <= room else None
    return None
