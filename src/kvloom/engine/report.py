"""The load that a unit and its models' queues report to the fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvloom.engine.model_queue import ModelQueue
from kvloom.kv.pool import Pool
from kvloom.types.job import Phase
from kvloom.types.load import LevelLoad, ModelLoad, UnitLoad, Waits, WeightLoad
from kvloom.types.request import Level, level_of
from kvloom.types.spec import EngineSpec
from kvloom.types.transfer import Transport


def unit_load(
    spec: EngineSpec,
    pool: Pool,
    queues: Mapping[str, ModelQueue],
    waits: Waits | None,
    recalled: int,
    transport: Transport,
    began: float,
    weights: Mapping[str, WeightLoad],
    *,
    draining: bool,
    bases: Mapping[str, str],
) -> UnitLoad:
    """Returns the load of the unit. waits: those of tasks that this unit does for another one; recalled: lent
    blocks that it wants back; began: when the engine began, by its clock; weights: the states of weights that
    can sleep; bases: the base of each adapter."""
    return UnitLoad(
        total_blocks=pool.total,
        free_blocks=pool.free,
        block_bytes=spec.block_bytes,
        policy=spec.policy,
        models={name: model_load(q, spec.priorities, weights.get(name)) for name, q in queues.items()},
        began=began,
        moves=spec.abilities.moves,
        draining=draining,
        lent_blocks=pool.lent,
        recalled_blocks=recalled,
        waits=waits,
        priorities=spec.priorities,
        path=transport.endpoint.kind,
        sent_bytes_total=transport.meter.bytes,
        sent_seconds_total=transport.meter.seconds,
        links=dict(transport.meter.links),
        adapters=dict(bases),
    )


def model_load(queue: ModelQueue, levels: Sequence[Level], weights: WeightLoad | None = None) -> ModelLoad:
    """Returns the load of one model. levels: those of execution priority. weights: None if they stay."""
    cache, geometry = queue.cache, queue.cache.geometry
    first = queue.waiting.first
    begun = (sequence for sequence in queue.running if not sequence.decodes)
    return ModelLoad(
        waiting=len(queue.waiting),
        oldest_wait=queue.oldest_wait,
        running=len(queue.running),
        used_blocks=cache.used_blocks,
        cached_blocks=cache.cached_blocks,
        pinned_blocks=cache.prefixes.pinned_blocks,
        quota_blocks=queue.quota,
        begun_blocks=queue.blocks(begun, to_end=True),
        head_blocks=geometry.blocks(first.tokens.length) if first else 0,
        waiting_blocks=sum(geometry.blocks(sequence.tokens.length) for sequence in queue.waiting),
        page_blocks=geometry.blocks_per_page,
        page_tokens=geometry.tokens_per_block,
        prompt_tokens_total=queue.stats.prompt_tokens,
        cached_tokens_total=queue.stats.cached_tokens,
        received_tokens_total=queue.stats.received_tokens,
        restored_tokens_total=queue.stats.restored_tokens,
        output_tokens_total=queue.stats.output_tokens,
        drafted_tokens_total=queue.stats.drafted_tokens,
        accepted_tokens_total=queue.stats.accepted_tokens,
        preemptions_total=queue.stats.preemptions,
        displaced_total=queue.stats.displaced,
        unread_total=queue.stats.unread,
        unread_blocks_total=queue.stats.unread_blocks,
        prefill_jobs_total=queue.stats.jobs[Phase.PREFILL],
        decode_jobs_total=queue.stats.jobs[Phase.DECODE],
        away=queue.planner.count,
        away_tokens_total=queue.planner.tokens_total,
        away_share=queue.planner.share,
        step_seconds=queue.step_time.seconds,
        prefill_speed=queue.prefill_speed.tokens_a_second,
        mixed_jobs_total=queue.stats.mixed,
        weights=weights,
        slo=queue.deadlines.slo,
        levels=_running(queue, levels) if levels else (),
    )


def _running(queue: ModelQueue, levels: Sequence[Level]) -> tuple[LevelLoad, ...]:
    running = Counter(level_of(sequence.order[0], levels) for sequence in queue.running)
    return tuple(
        LevelLoad(priority=level.priority, headroom=level.headroom, running=count)
        for level, count in running.items()
        if level is not None
    )
