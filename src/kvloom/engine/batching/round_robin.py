"""Turn by turn over the models, prefill before decode in each, as many side by side as fit. No quotas."""

from __future__ import annotations

from kvloom.engine.batching.view import Action, Decode, ModelView, Preempt, Prefill, UnitView


def round_robin(view: UnitView) -> Action | None:
    if view.idle == 0:
        return None
    turns = sorted(
        (m for m in view.models if not (m.prefilling or m.decoding) and (m.wants_prefill or m.wants_decode)),
        key=lambda m: max(m.last_prefill, m.last_decode),
    )
    busy = view.idle < view.compute
    share = min(view.idle, max(1, view.compute // 2)) if busy or len(turns) > 1 else view.compute
    for model in turns:
        action = _turn(view, model, share)
        if action:
            return action
    return None


def _turn(view: UnitView, model: ModelView, share: int) -> Action | None:
    rested = model.last_prefill <= model.last_decode or not model.wants_decode
    kept = view.urgent.head_blocks if view.urgent and view.urgent is not model else 0
    if model.wants_prefill and rested and model.head_blocks <= view.free(model) - kept:
        return Prefill(model.name, share, view.free(model) - kept)
    if not model.wants_decode:
        return None
    if model.decode_blocks > view.free(model):
        return Preempt(max(view.givers(model), key=lambda m: m.victim).name)
    return Decode(model.name, share)
