"""Adaptive batch scheduling (MuxServe, algorithm 3).

Prefills go first, one at a time, round-robin over the models. Decodes of all models that have room run beside
them. Block quotas decide who gives way.

If a prefill would take the whole device and let its model's own decodes wait, both are one job, whose chunk
of the prompt is bounded by what a decode step takes (Agrawal et al., "Taming Throughput-Latency Tradeoff in
LLM Inference with Sarathi-Serve", OSDI 2024, section 4).
"""

from __future__ import annotations

from typing import Final

from kvloom.engine.batching.job_times import WEIGHT_READ_TOKENS
from kvloom.engine.batching.view import (
    LASTING,
    Action,
    Decode,
    Mixed,
    ModelView,
    Order,
    Preempt,
    Prefill,
    UnitView,
    gives_way,
    outnumbered,
)

LONGER: Final = 3  # times that a mixed job may take as long as its decode step alone, if one prompt waits


def adbs(view: UnitView) -> Action | None:
    """Returns the next action of adaptive batch scheduling."""
    if view.crowded:
        return outnumbered(view.crowded)
    prompts = [model for model in view.models if model.wants_prefill]
    if not view.prefill_runs:
        action, hold = _next_prefill(view, prompts)
        if action or hold:
            return action
    return _next_decode(view, prefills=bool(prompts))


def _next_prefill(view: UnitView, prompts: list[ModelView]) -> tuple[Action | None, bool]:
    """Returns the next prefill, or the preemption that makes room for it; and whether decodes must wait until
    the compute for the prefill is free. prompts: the models that want one."""
    for model in sorted(prompts, key=lambda m: m.last_prefill):
        budget, preemption = room_for(view, model)
        if preemption:
            return preemption, False
        if not model.fits(budget):
            continue
        share, turn = _prefill_share(view, model)
        mixed = _mixed(view, model, share, budget)
        if not turn and mixed is None:
            return None, False
        fits = view.idle + view.overload >= share
        return (mixed or Prefill(model.name, share, budget), False) if fits else (None, True)
    return None, False


def _mixed(view: UnitView, model: ModelView, share: int, budget: int) -> Mixed | None:
    """Returns the job that has the model's prefill, which takes `share` and at most `budget` blocks, and its
    decodes; None if they are better apart: they run side by side, or another model's step is next.

    A prompt's token costs what a sequence that decodes costs, and the weights, which are read once for all,
    what `WEIGHT_READ_TOKENS` tokens cost. So the chunk that keeps a decode step within `LONGER` times its own
    length is a number of tokens, whatever the model's size. Each prompt that queues behind the first one adds
    as many tokens to the chunk: short chunks would leave more of the device to the decodes than the waiting
    prompts can spare.
    """
    if not (view.mixes and model.mixes and share == view.compute and model.wants_decode):
        return None
    late = (other for other in view.models if other.wants_decode and other.last_decode < model.last_decode)
    if view.last_was_prefill and any(late):
        return None
    blocks = min(budget, view.free(model) - model.decode_blocks)
    if model.head_blocks > blocks:
        return None
    prompts = model.waiting + model.partial
    tokens = (LONGER - 1) * (WEIGHT_READ_TOKENS + model.decodable) * prompts
    return Mixed(model.name, share, blocks, tokens)


def _prefill_share(view: UnitView, model: ModelView) -> tuple[int, bool]:
    """Returns the prefill's share of the compute, and whether it is its turn.

    A planned share is what it takes beside decodes. If none is planned, and fewer sequences decode than wait,
    filling the batch gains more than stepping a small one: the prefill takes the whole device, and the
    decodes step once between two such jobs. Otherwise both run at the same time.
    """
    decodes = sum(model.decodable for model in view.models) or any(model.decoding for model in view.models)
    if not decodes:
        return view.compute, True
    if model.prefill_share:
        return model.prefill_share, True
    if view.compute == 1 or view.filling:
        stepped = not view.last_was_prefill or not any(model.wants_decode for model in view.models)
        return view.compute, stepped
    return (view.compute + 1) // 2, True


def room_for(view: UnitView, model: ModelView) -> tuple[int, Preempt | None]:
    """Returns the blocks that the next prompts of `model` may take, and the preemption that makes room for
    the first of them if they are too few and one may."""
    budget = _budget(view, model)
    if model.fits(budget):
        return budget, None
    if model.outnumbered:
        return budget, outnumbered(model)
    giver = _victim(view, model)
    return budget, gives_way(view, giver, model, model.head_blocks) if giver else None


def _budget(view: UnitView, model: ModelView) -> int:
    """Returns the blocks that new prompts of `model` may take: its quota's rest, or what no other model
    claims; less a little room for what runs to grow, so that admission does not force a preemption at the
    next step. What the urgent model lacks is kept for it alone. A prompt to which others
    give way takes what is free, for itself alone."""
    urgent = view.urgent
    if model is urgent or view.walls:
        return view.free(model)
    kept = urgent.head_blocks if urgent else 0
    claims = sum(
        min(max(-other.excess, 0), other.head_blocks * (other.waiting + other.partial) + other.decode_blocks)
        for other in view.models
        if other is not model
    )
    free = view.free_blocks - kept
    budget = min(free, max(-model.excess, view.free_blocks - claims)) - model.growth
    return max(budget, min(free, model.head_blocks)) if model.outnumbered else budget


def _victim(view: UnitView, model: ModelView) -> ModelView | None:
    """Returns the model that gives way to `model`'s next prompt. Within its quota `model` may take back what
    others hold beyond theirs; the urgent model takes from whatever came after it."""
    others = [other for other in view.givers(model) if other is not model]
    if model is view.urgent:
        others = [other for other in others if other.victim > model.head]
    elif model.used + model.head_blocks <= model.quota:
        others = [other for other in others if other.excess > 0 and _yields(view, other, model.head)]
    else:
        return None
    return max(others, key=lambda m: (m.excess, m.used), default=None)


def _yields(view: UnitView, other: ModelView, order: Order) -> bool:
    """Returns whether quotas alone may take blocks of `other` for a sequence of `order`. A sequence that came
    before is spared if it has starved, or is all that its model runs and was computed a while ago at most."""
    if other.victim > order:
        return True
    return not view.starving(other) and (other.running > 1 or view.jobs - other.last_prefill > LASTING)


def _next_decode(view: UnitView, *, prefills: bool) -> Action | None:
    """Returns the next decode step, or the preemption that makes room for it. prefills: whether some model
    wants a prefill."""
    room = view.idle + view.overload
    if room <= 0:
        return None
    ready = sorted([m for m in view.models if m.wants_decode], key=lambda m: m.last_decode)
    for model in ready:
        if model.decode_blocks <= view.room_to_step(model):
            together = len(ready) > 1 or view.idle < view.compute or (prefills and not view.filling)
            beside = model.decode_share or max(1, view.compute // 2)
            return Decode(model.name, min(room, beside) if together else view.compute)
        giver = step_giver(view, model)
        if giver.held:
            return gives_way(view, giver, model, model.decode_blocks)
        # All that it runs is in a job, whose end is near.
    return None


def step_giver(view: UnitView, model: ModelView) -> ModelView:
    """Returns the model whose blocks the next step of `model` takes: the one most over quota, or `model`
    itself."""
    others = [m for m in view.models if m.running and not view.walls]
    over = [m for m in others if m.excess > 0 and _yields(view, m, model.victim)]
    return max([model, *over], key=lambda m: (m.excess, m is model))
