"""A model's turn, for policies that run one job of each model at a time: prefill and decode by turns. No
quotas."""

from __future__ import annotations

from kvloom.engine.batching.view import Action, Decode, ModelView, Preempt, Prefill, UnitView


def turn(view: UnitView, model: ModelView, prefill_share: int, decode_share: int) -> Action | None:
    """What a model that is in no job would do next, whatever compute there is."""
    rested = model.last_prefill <= model.last_decode or not model.wants_decode
    kept = view.urgent.head_blocks if view.urgent and view.urgent is not model else 0
    room = view.free(model) - kept - model.growth
    if model.wants_prefill and rested and model.head_blocks <= room:
        return Prefill(model.name, prefill_share, room)
    if not model.wants_decode:
        return None
    if model.decode_blocks > view.free(model):
        return Preempt(max(view.givers(model), key=lambda m: m.victim).name)
    return Decode(model.name, decode_share)


def waiting_turns(view: UnitView) -> list[ModelView]:
    """Models that are in no job and want one; who has rested longest is first."""
    wanting = (m for m in view.models if m.wants_prefill or m.wants_decode)
    return sorted(
        (m for m in wanting if not (m.prefilling or m.decoding)),
        key=lambda m: max(m.last_prefill, m.last_decode),
    )
