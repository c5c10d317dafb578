"""Turn by turn over the models, prefill before decode in each, as many side by side as fit. No quotas."""

from __future__ import annotations

from kvloom.engine.batching.turn import turn, waiting_turns
from kvloom.engine.batching.view import Action, Preempt, UnitView


def round_robin(view: UnitView) -> Action | None:
    """A planned prefill that is larger than what is free waits for room, and all others with it."""
    room = view.idle + view.overload
    if room <= 0:
        return None
    turns = waiting_turns(view)
    together = view.idle < view.compute or len(turns) > 1
    for model in turns:
        prefill, decode = (
            _share(view, planned, room) if together else view.compute
            for planned in (model.prefill_share, model.decode_share)
        )
        action = turn(view, model, prefill, min(room, decode))
        if action:
            return action if isinstance(action, Preempt) or action.share <= room else None
    return None


def _share(view: UnitView, planned: int, room: int) -> int:
    """Of a job beside others: half of the compute, or what is left of it, where none is planned."""
    return planned or min(room, max(1, view.compute // 2))
