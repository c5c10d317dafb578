"""The policies that `adbs` is compared with: first come first served, vLLM's of 2023, MuxServe's as
published, round-robin, and partitioned shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from msgspec import structs

from kvloom.engine.batching.view import (
    Action,
    Decode,
    ModelView,
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
    return _step(view, ready[0]) if ready else None


def _step(view: UnitView, model: ModelView) -> Action:
    """Returns a decode step of `model` on the whole device, or the preemption that makes room for it."""
    if model.decode_blocks > view.room_to_step(model):
        giver = max(view.givers(model), key=lambda m: m.victim)
        return gives_way(view, giver, model, model.decode_blocks)
    return Decode(model.name, view.compute)


WATERMARK: Final = 0.01  # of the pool's blocks, which stay free when a prompt is let in


def vllm_2023(view: UnitView) -> Action | None:
    """Does what vLLM's scheduler did in 2023, upon which the systems of that time were built and measured
    (Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP
    2023, section 4.5, and release 0.1).

    The next step's blocks are taken first; if there are too few the latest sequence gives way, and nothing is
    kept of it. Prompts go before the step, whole and several a job, in the strict order of arrival: the first
    one waits until it finds room beside the watermark, and all others behind it. A sequence that gave way is
    computed again in full, before prompts that came later. Nothing is kept free for later steps.

    It knows one model and no quotas: all models share the pool in the order of arrival, even if quotas are
    fixed. The watermark is a page at least, however small the pool is. With less, a sequence that gave way
    could be let in again before the step for which it gave way, and be taken from at once, for ever.

    If several models share the engine, the step is that of the model whose sequence came first, as in the
    temporal multiplexing that was published with MuxServe: the others wait until it has ended.
    """
    if view.walls:
        return vllm_2023(structs.replace(view, walls=False))
    if view.idle < view.compute:
        return None
    steps = [model for model in view.models if model.wants_decode]
    ready = min(steps, key=lambda m: m.step_order, default=None)
    action = _step(view, ready) if ready else None
    if isinstance(action, Preempt):
        return replace(action, kept=False)
    first = min((m for m in view.models if m.wants_prefill), key=lambda m: m.head, default=None)
    if first is not None:
        room = _room_2023(view, first)
        if first.fits(room):
            return Prefill(first.name, view.compute, room, whole=True)
    return action


def _room_2023(view: UnitView, model: ModelView) -> int:
    """Returns the blocks that prompts of `model` may take beside the watermark and the next steps."""
    page = max(m.page_blocks for m in view.models)
    steps = sum(m.decode_blocks for m in view.models if m.wants_decode)
    return view.free(model) - max(page, int(WATERMARK * view.total_blocks)) - steps


def adbs_2024(view: UnitView) -> Action | None:
    """Does what was published with MuxServe as adaptive batch scheduling (Duan et al., ICML 2024, algorithm
    3, and the code beside the paper), over memory as vLLM's of 2023 treats it.

    If no prefill runs, the models are asked for one by turns. While one could start but for the compute, no
    decode starts either. Otherwise decodes start by turns while there is compute for them. Each job has its
    planned share and no other. A model that finds no block for its next step makes its own latest sequence
    give way, and nothing is kept of that. Quotas bound how many sequences a model runs: they are the unit's
    (`sequences`), not this function's. Two things deviate, or requests would wait for ever: the blocks of a
    prompt that has starved are kept, and a sequence that runs alone goes on beyond a quota of blocks.
    """
    room = view.idle + view.overload
    if not view.prefill_runs:
        kept = view.urgent.head_blocks if view.urgent else 0
        fitting = [
            (model, budget)
            for model in sorted(view.models, key=lambda m: m.last_prefill)
            if model.wants_prefill
            and model.fits(budget := _room_2023(view, model) - kept * (model is not view.urgent))
        ]
        for model, budget in fitting:
            share = model.prefill_share or view.compute
            if share <= room:
                return Prefill(model.name, share, budget, whole=True)
        if fitting:
            return None
    for model in sorted((m for m in view.models if m.wants_decode), key=lambda m: m.last_decode):
        share = model.decode_share or view.compute
        if share > room:
            continue
        if model.decode_blocks <= view.room_to_step(model):
            return Decode(model.name, share)
        if model.held:
            return replace(gives_way(view, model, model, model.decode_blocks), kept=False)
    return None


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
