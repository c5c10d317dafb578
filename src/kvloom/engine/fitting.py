"""How models fit a unit's pool."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from kvloom.core.geometry import Geometry
from kvloom.core.job import Executor
from kvloom.core.request import ModelCard
from kvloom.core.spec import EngineSpec, ModelSpec
from kvloom.engine.model_queue import ModelQueue
from kvloom.kv.pool import Pool

_log = logging.getLogger(__name__)
_MUCH_WASTE = 0.05


def fit(executor: Executor, spec: EngineSpec, *, reserved: int) -> tuple[Pool, dict[str, ModelQueue]]:
    """A pool over the executor's blocks, and a queue for each model. reserved: a cache's rows beyond those of
    sequences that run."""
    _tell_waste(executor.geometries)
    cards = {
        name: fitted(card, executor.geometries[name], executor.blocks)
        for name, card in executor.cards.items()
    }
    pool = Pool(
        executor.blocks,
        executor.geometries,
        max_sequences=spec.max_running + reserved,
        max_tokens={name: card.context_length for name, card in cards.items()},
    )
    shares = {model.name: _planned_shares(model, executor.compute) for model in spec.models}
    queues = {
        name: ModelQueue(
            card, pool.caches[name], spec.max_running, spec.max_waiting, shares.get(name, (0, 0))
        )
        for name, card in cards.items()
    }
    return pool, queues


def fitted(card: ModelCard, geometry: Geometry, blocks: int) -> ModelCard:
    """The card of a model that can hold no longer sequence than the whole pool does."""
    most = blocks // geometry.blocks_per_page * geometry.tokens_per_block
    if most >= card.context_length:
        return card
    _log.warning(
        "the context of %s is %d tokens, not %d: more do not fit into the pool (kv_memory)",
        card.name,
        most,
        card.context_length,
    )
    return msgspec.structs.replace(card, context_length=most)


def _planned_shares(model: ModelSpec, compute: int) -> tuple[int, int]:
    """Of a prefill and of a decode job, in units of `compute`; 0 where none is planned."""
    prefill, decode = (
        0 if share is None else max(1, round(share * compute))
        for share in (model.prefill_share, model.decode_share)
    )
    return prefill, decode


def _tell_waste(geometries: Mapping[str, Geometry]) -> None:
    """Whose head size fits the blocks badly."""
    for name, geometry in geometries.items():
        if geometry.waste > _MUCH_WASTE:
            _log.info(
                "%.0f %% of each block of %s is unused: %d bytes hold %d tokens of %d (block_bytes)",
                100 * geometry.waste,
                name,
                geometry.block_bytes,
                geometry.tokens_per_block,
                geometry.token_bytes,
            )
