"""First come, first served, one job at a time on the whole device (MuxServe's temporal baseline): the
oldest waiting prompt that fits, else the decode that has waited longest. No quotas."""

from __future__ import annotations

from kvloom.engine.batching.view import Action, Decode, Preempt, Prefill, UnitView


def fcfs(view: UnitView) -> Action | None:
    if view.idle < view.compute:
        return None
    prompts = sorted((m for m in view.models if m.wants_prefill), key=lambda m: m.head)
    ready = sorted((m for m in view.models if m.wants_decode), key=lambda m: m.last_decode)
    if prompts and not (view.last_was_prefill and ready):
        first = prompts[0]
        room = view.free(first) - first.growth
        if first.head_blocks <= room:
            return Prefill(first.name, view.compute, room)
    if not ready:
        return None
    if ready[0].decode_blocks > view.free(ready[0]):
        return Preempt(max(view.givers(ready[0]), key=lambda m: m.victim).name)
    return Decode(ready[0].name, view.compute)
