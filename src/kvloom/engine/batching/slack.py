"""Least slack first: what would miss its deadline soonest, of all that can still make it.

Prompts go before decode steps as long as these can spare the time: a step waits while the streams that it
serves are ahead of their deadlines. What they can spare bounds the prompt's chunk. So batches grow early,
and a step serves many. Of several prompts, the one with the least slack is first, and those that are too
late come last; so do steps of streams of which none can be in time any more. A prompt waits if the steps of
all models would take longer with it than their streams have from token to token.

More urgent priorities come before all this. Nobody starves: a model whose prompts have waited for `STARVING`
jobs, or whose streams have waited for `RESTED` jobs, is next whatever the deadlines are, and of one model's
prompts some late ones go first (`FairQueue.put_behind`). Blocks are given and taken back as under `adbs`. A
job beside others has its planned share of the device, and one that runs alone all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from kvloom.engine.batching.adbs import room_for, step_giver
from kvloom.engine.batching.job_times import WEIGHT_READ_TOKENS
from kvloom.engine.batching.view import (
    STARVING,
    Action,
    Decode,
    Mixed,
    ModelView,
    Prefill,
    UnitView,
    gives_way,
    outnumbered,
)

RESTED: Final = 16  # jobs that may start elsewhere before streams that are late are stepped
FULL: Final = 1.0  # of the time, that steps of streams in time may take, with a prompt that is let in
LATE: Final = 0.5  # the same, if that prompt is late


def slack(view: UnitView) -> Action | None:
    """Returns the action for what has the least slack of all that can be in time."""
    if view.crowded:
        return outnumbered(view.crowded)
    steps = sorted((m for m in view.models if m.wants_decode), key=lambda m: _step_rank(view, m))
    if not view.prefill_runs:
        for model in sorted((m for m in view.models if m.wants_prefill), key=lambda m: _rank(view, m)):
            action, hold = _prompts(view, model, steps)
            if action or hold:
                return action
    return _step(view, steps)


def _rank(view: UnitView, model: ModelView) -> tuple[bool, bool, int, bool, float]:
    """Returns the place of the model's next prompt among those of the others."""
    urgent, waits = model is view.urgent, _waits(view, model)
    return (
        not urgent,
        not waits,
        model.head[0],
        _is_late(view, model),
        model.head_latest - model.head_tokens * model.token_seconds,
    )


def _is_late(view: UnitView, model: ModelView) -> bool:
    return view.now + (WEIGHT_READ_TOKENS + model.head_tokens) * model.token_seconds > model.head_latest


def _waits(view: UnitView, model: ModelView) -> bool:
    """Returns whether the model's prompts have waited for too long."""
    return view.jobs - max(model.head_since, model.last_prefill) > STARVING


def _step_rank(view: UnitView, model: ModelView) -> tuple[bool, int, float, int]:
    """Returns the place of the model's next step among those of the others."""
    rested = view.jobs - model.last_decode > RESTED
    return not rested, model.step_priority, model.step_due, model.last_decode


def _prompts(view: UnitView, model: ModelView, steps: Sequence[ModelView]) -> tuple[Action | None, bool]:
    """Returns the job that has the model's next prompts, or the preemption that makes room for them; and
    whether steps must hold until the compute for it is free. steps: those that are ready, in their order."""
    budget, preemption = room_for(view, model)
    if preemption or not model.fits(budget):
        return preemption, False
    share = _share(view, model.prefill_share, alone=not steps)
    blocks = min(budget, view.free(model) - model.decode_blocks)
    mixed = view.mixes and model.mixes and share == view.compute and model.wants_decode
    mixed = mixed and model.head_blocks <= blocks
    rows = model.decodable if mixed else 0
    tokens: int | None = max(1, model.head_tokens)
    if not _waits(view, model):
        tokens = None
        if not model.partial and not _admits(view, model):
            return None, False
        beside = share < view.compute
        spare = inf if beside else _spare(view, model, [m for m in steps if not (mixed and m is model)])
        if mixed and model.step_priority <= model.head[0]:
            spare = min(spare, model.step_due - view.now)
        if spare < inf and model.token_seconds:
            tokens = int(spare / model.token_seconds) - WEIGHT_READ_TOKENS - rows
            if tokens < min(model.head_tokens, 2 * (WEIGHT_READ_TOKENS + rows)):
                return None, False
    if view.idle + view.overload < share:
        return None, True
    if mixed:
        return Mixed(model.name, share, blocks, tokens or (1 << 20)), False
    return Prefill(model.name, share, budget, tokens), False


def _admits(view: UnitView, model: ModelView) -> bool:
    """Returns whether the steps of all models keep up with their streams if one more of the model runs."""
    load = (WEIGHT_READ_TOKENS * (model.running == 0) + 1) * model.token_seconds / model.tpot
    for other in (m for m in view.models if m.awake and m.step_priority <= model.head[0]):
        load += (other.step_seconds + (other.running - other.decodable) * other.token_seconds) / other.tpot
    return load <= (LATE if _is_late(view, model) else FULL)


def _spare(view: UnitView, model: ModelView, steps: Sequence[ModelView]) -> float:
    """Returns the seconds that a prompt of the model may take before these steps would be late."""
    spare, taken = inf, 0.0
    for step in sorted(steps, key=lambda m: m.step_due):
        if step.step_due < inf and step.step_priority <= model.head[0]:
            taken += step.step_seconds
            spare = min(spare, step.step_due - view.now - taken)
    return spare


def _step(view: UnitView, steps: Sequence[ModelView]) -> Action | None:
    """Returns the next decode step, or the preemption that makes room for it."""
    room = view.idle + view.overload
    for model in steps if room > 0 else ():
        if model.decode_blocks <= view.room_to_step(model):
            share = _share(view, model.decode_share, alone=len(steps) == 1)
            return Decode(model.name, min(room, share))
        giver = step_giver(view, model)
        if giver.held:
            return gives_way(view, giver, model, model.decode_blocks)
    return None


def _share(view: UnitView, planned: int, *, alone: bool) -> int:
    """Returns a job's share of the compute: the planned one beside others, and all of it if nothing runs.
    alone: no step of another job is ready."""
    return view.compute if alone and view.idle == view.compute else planned or view.compute
