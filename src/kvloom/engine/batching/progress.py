"""What keeps any policy moving: where nothing runs and the policy lets nothing start, the first prompt of all
goes on, and later ones give their blocks back for it. So the first request always ends, and then the next."""

from __future__ import annotations

from kvloom.engine.batching.view import Action, Preempt, Prefill, UnitView


def last_resort(view: UnitView) -> Action | None:
    if view.idle < view.compute:
        return None
    first = min((m for m in view.models if m.wants_prefill), key=lambda m: m.head, default=None)
    if first is None:
        return None
    if first.head_blocks <= view.free_blocks:
        return Prefill(first.name, view.compute, view.free_blocks)
    later = [m for m in view.models if m.held and m.victim > first.head]
    return Preempt(max(later, key=lambda m: m.victim).name) if later else None
