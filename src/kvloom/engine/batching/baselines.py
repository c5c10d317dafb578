"""The policies that `adbs` is compared with: first come first served, round-robin, and partitioned shares."""

from __future__ import annotations

from kvloom.engine.batching.view import (
    Action,
    Decode,
    Preempt,
    Prefill,
    UnitView,
    gives_way,
    turn,
    waiting_turns,
)


def fcfs(view: UnitView) -> Action | None:
    """Runs one job at a time on the whole device: the oldest prompt and a decode step by turns."""
    if view.idle < view.compute:
        return None
    prompts = sorted((m for m in view.models if m.wants_prefill), key=lambda m: m.head)
    ready = sorted((m for m in view.models if m.wants_decode), key=lambda m: m.last_decode)
    if prompts and not (view.last_was_prefill and ready):
        first = prompts[0]
        room = view.free(first) - first.growth
        if first.fits(room):
            return Prefill(first.name, view.compute, room)
    if not ready:
        return None
    if ready[0].decode_blocks > view.free(ready[0]):
        giver = max(view.givers(ready[0]), key=lambda m: m.victim)
        return gives_way(view, giver, ready[0], ready[0].decode_blocks)
    return Decode(ready[0].name, view.compute)


def round_robin(view: UnitView) -> Action | None:
    """Runs models by turns. A planned prefill that is larger than what is free waits for room, and all others
    with it."""
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
    """Returns the share of a job beside others: half of the compute, or what is left of it, if none is
    planned."""
    return planned or min(room, max(1, view.compute // 2))


def partitioned(view: UnitView) -> Action | None:
    """Gives each model its planned shares, or an equal one of at least one unit of compute. If there are too
    few units for all models, they run by turns."""
    room, equal = view.idle + view.overload, max(1, view.compute // view.served)
    for model in waiting_turns(view):
        action = turn(view, model, model.prefill_share or equal, model.decode_share or equal)
        if action:
            return action if isinstance(action, Preempt) or action.share <= room else None
    return None
