"""The queues of a unit's models, adapters among them, and their quotas: how models use theirs, and how blocks
move between them (MuxServe, algorithm 3, last line)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Final, Protocol, TypeVar

import msgspec

from kvloom.engine.model_queue import ModelQueue
from kvloom.kv.pool import Pool
from kvloom.kv.prefix_feed import adapter_salt
from kvloom.kv.quota import QuotaUsage, adapt_quotas, initial_quotas
from kvloom.types.clock import Clock
from kvloom.types.geometry import Geometry
from kvloom.types.job import Executor
from kvloom.types.request import ModelCard
from kvloom.types.spec import AdapterSpec, EngineSpec, ModelSpec, Slo

_PERIOD = 8.0  # seconds, MuxServe's


class QuotaTuner:
    """Measures how models use their quotas, and adapts them."""

    def __init__(self, queues: Mapping[str, ModelQueue], spec: EngineSpec, pool: Pool, clock: Clock) -> None:
        self._queues = queues
        self._pool = pool
        total = pool.total
        self._quotas: dict[str, int] = {}
        """Those that the models have while weights take none of the pool."""
        self._clock = clock
        self._moves = spec.quotas == "adaptive"
        self._changed = set(queues.values())
        self._held = dict.fromkeys(queues.values(), 0)  # blocks, as was last observed
        if self._moves:
            for queue in queues.values():
                queue.watchers.append(self._changed)
        geometries = {name: queue.cache.geometry for name, queue in queues.items()}
        self._set(
            initial_quotas(total, geometries, {model.name: model.rate for model in spec.models})
            | {model.name: int(model.quota * total) for model in spec.models if model.quota is not None}
        )
        self._begin()

    def _begin(self) -> None:
        self._due = self._clock.now() + _PERIOD
        self._jobs = 0
        self._more = dict.fromkeys(self._held, 0)
        """Blocks that the jobs so far have seen beyond what is held now, summed over them."""

    def observe(self, jobs: int) -> None:
        """Notes who holds what as `jobs` jobs have ended."""
        for queue in self._changed:
            held = queue.cache.used_blocks
            self._more[queue] += (self._held[queue] - held) * self._jobs
            self._held[queue] = held
        self._changed.clear()
        self._jobs += jobs

    def adapt(self) -> None:
        """Moves quotas towards use, once a period in which jobs ran."""
        if not self._moves or self._jobs == 0 or self._clock.now() < self._due:
            return
        usage = {
            name: QuotaUsage(self._used(queue) / self._jobs, queue.blocks(queue.waiting, to_end=True))
            for name, queue in self._queues.items()
        }
        self._set(adapt_quotas(self._pool.total, self._quotas, usage))
        self._begin()

    def resize(self) -> None:
        """Makes quotas as much smaller than in the whole pool as the room is that weights leave to K and V;
        each holds a page at least."""
        room, total = self._pool.room, self._pool.total
        for name, queue in self._queues.items():
            queue.quota = max(self._quotas[name] * room // total, queue.cache.geometry.blocks_per_page)
            queue.changed()

    def _used(self, queue: ModelQueue) -> int:
        """Returns the blocks that the jobs of this period have seen, summed over them."""
        return self._held[queue] * self._jobs + self._more[queue]

    def _set(self, quotas: Mapping[str, int]) -> None:
        self._quotas.update(quotas)
        if self._pool.weights:
            self.resize()
            return
        for name, quota in quotas.items():
            self._queues[name].quota = quota
            self._queues[name].changed()


class Salted(Protocol):
    """A body of a verb that names a model and a salt."""

    @property
    def model(self) -> str: ...

    @property
    def salt(self) -> str: ...


Body = TypeVar("Body", bound=Salted)


class ModelQueues(dict[str, ModelQueue]):
    """The queues by their models' names. It is asked for an adapter's, too, and has that of its base, in
    which all run in one batch; it counts and lists each queue once."""

    def __init__(self, queues: Mapping[str, ModelQueue], models: Iterable[ModelSpec] = ()) -> None:
        super().__init__(queues)
        self.adapters: Final[dict[str, tuple[str, AdapterSpec]]] = {}
        """By name, each with its base."""
        for model in models:
            for adapter in model.adapters:
                self.adapters[adapter.name] = model.name, adapter

    def __missing__(self, name: str) -> ModelQueue:
        base, _ = self.adapters[name]
        return self[base]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.adapters

    @property
    def bases(self) -> dict[str, str]:
        """The base of each adapter."""
        return {name: base for name, (base, _) in self.adapters.items()}

    @property
    def cards(self) -> dict[str, ModelCard]:
        """The cards of all models, adapters included."""
        cards = {name: queue.card for name, queue in self.items()}
        for name, (base, adapter) in self.adapters.items():
            cards[name] = msgspec.structs.replace(cards[base], name=name, path=adapter.path, parent=base)
        return cards

    def of_base(self, body: Body) -> Body:
        """Returns the body with the base for its model, for what an adapter shares with it: the tokenizer."""
        if body.model not in self.adapters:
            return body
        return msgspec.structs.replace(body, model=self.adapters[body.model][0])  # type: ignore[type-var]

    def salted(self, body: Body) -> Body:
        """Returns the body with the salt by which its prefixes are cached: an adapter has its own, because it
        has K and V of its own."""
        if body.model not in self.adapters:
            return body
        return msgspec.structs.replace(body, salt=adapter_salt(body.model, body.salt))  # type: ignore[type-var]


_log = logging.getLogger(__name__)
_MUCH_WASTE = 0.05


def fit(executor: Executor, spec: EngineSpec, clock: Clock, *, reserved: int) -> tuple[Pool, ModelQueues]:
    """Returns a pool over the executor's blocks, and a queue for each model. reserved: a cache's rows beyond
    those of sequences that run."""
    _tell_waste(executor.geometries)
    weights = {} if executor.weights is None else executor.weights.blocks
    cards = {
        name: fitted(card, executor.geometries[name], executor.blocks - weights.get(name, 0))
        for name, card in executor.cards.items()
    }
    pool = Pool(
        executor.blocks,
        executor.geometries,
        max_sequences=spec.max_running + reserved,
        max_tokens={name: card.context_length for name, card in cards.items()},
    )
    shares = {model.name: _planned_shares(model, executor.compute) for model in spec.models}
    slos = {model.name: model.slo for model in spec.models}
    rates = {model.name: model.rate or 0.0 for model in spec.models}
    queues = {
        name: ModelQueue(
            card,
            pool.caches[name],
            spec.max_running,
            spec.max_waiting,
            shares.get(name, (0, 0)),
            slos.get(name, Slo()),
            clock,
            rates.get(name, 0.0),
        )
        for name, card in cards.items()
    }
    return pool, ModelQueues(queues, spec.models)


def fitted(card: ModelCard, geometry: Geometry, blocks: int) -> ModelCard:
    """Returns the card of a model that can hold no longer sequence than the whole pool does."""
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
    """Returns the shares of a prefill and of a decode job, in units of `compute`; 0 if none is planned."""
    prefill, decode = (
        0 if share is None else max(1, round(share * compute))
        for share in (model.prefill_share, model.decode_share)
    )
    return prefill, decode


def _tell_waste(geometries: Mapping[str, Geometry]) -> None:
    """Logs the models whose head size fits the blocks badly."""
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
