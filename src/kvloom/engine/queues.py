"""The queues of a unit by its models' names, adapters among them; how they are made, with the pool that they
share; and the queue of pooling models."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol, TypeVar

import msgspec

from kvloom.engine.batching.fair_queue import INPUT_COST
from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.sequence import Sequence, Status
from kvloom.journal.records import Recorder, nobody
from kvloom.kv.pool import Pool
from kvloom.kv.prefix_feed import adapter_salt
from kvloom.offload.planner import DecodePlanner
from kvloom.types.clock import Clock
from kvloom.types.errors import ConfigError
from kvloom.types.geometry import Geometry
from kvloom.types.job import Executor, Job, ProvenAdapter
from kvloom.types.request import ModelCard
from kvloom.types.spec import MOST_ROWS, AdapterSpec, EngineSpec, ModelSpec, Slo

_log = logging.getLogger(__name__)
_MUCH_WASTE = 0.05
ADAPTED: Final = 4  # one part in so many of the pool is kept for adapters, if all need so much


class PoolingPlanner(DecodePlanner[Sequence]):
    """The planner of a pooling model. It plans nothing and has nothing to give back, because texts of which
    vectors are made have no pages."""

    def release(self, sequence: Sequence) -> None:
        """Does nothing."""

    def finish(
        self, job: Job, lost: str | None, valid: Mapping[int, int] | None = None
    ) -> tuple[set[int], list[Sequence]]:
        return set(), []

    def fail(self, job: Job) -> list[Sequence]:
        return []


class PoolingQueue(ModelQueue):
    """The texts of a pooling model, which makes vectors of them. A text is computed whole, in one prefill job
    with others, and takes no blocks: no token follows that would need its K and V."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.planner = PoolingPlanner(self.cache)

    @property
    def page_blocks(self) -> int:
        return 0

    @property
    def blocks_of_longest(self) -> int:
        return 0

    def blocks(self, sequences: Iterable[Sequence], *, to_end: bool = False) -> int:
        return 0

    def admit(self, sequence: Sequence) -> None:
        """Moves a waiting text to the running ones, and charges its tenant."""
        self.changed()
        self.waiting.went(sequence)
        sequence.adopted(0)
        self.waiting.charge(sequence, INPUT_COST * sequence.pending)
        sequence.become(Status.RUNNING)
        self.run(sequence)

    def prefill_batch(
        self, budget: int, tokens: int, jobs: int, *, whole: bool = True
    ) -> list[tuple[Sequence, int]]:
        """Returns the texts of one job: as many as `tokens` tokens hold, but one at least, whatever its
        length."""
        batch: list[tuple[Sequence, int]] = []
        while (text := self.next_in) is not None and (not batch or text.pending <= tokens):
            self.admit(text)
            batch.append((text, text.pending))
            tokens -= text.pending
        return batch


class Salted(Protocol):
    """A body of a verb that names a model and a salt."""

    @property
    def model(self) -> str: ...

    @property
    def salt(self) -> str: ...


Body = TypeVar("Body", bound=Salted)


class ServedAdapter(msgspec.Struct, frozen=True):
    """An adapter that is served, in memory or not."""

    base: str
    spec: AdapterSpec
    digest: str = ""  # of what it computes with
    blocks: int = 0  # of the pool that its weights take the place of while they are in memory
    leaving: bool = False  # it gets no new requests, and is gone once those that are here have ended


class ModelQueues(dict[str, ModelQueue]):
    """The queues by the names of models and adapters. An adapter's name gives the queue of its base, because
    both run in one batch. Iteration and `len` see each queue once; an adapter that leaves is not in it."""

    def __init__(
        self,
        queues: Mapping[str, ModelQueue],
        models: Iterable[ModelSpec] = (),
        proven: Mapping[str, ProvenAdapter] | None = None,
    ) -> None:
        super().__init__(queues)
        self.adapters: Final[dict[str, ServedAdapter]] = {}
        for model in models:
            for adapter in model.adapters:
                found = (proven or {}).get(adapter.name, ProvenAdapter("", 0))
                self.adapters[adapter.name] = ServedAdapter(model.name, adapter, found.digest, found.blocks)

    def __missing__(self, name: str) -> ModelQueue:
        return self[self.adapters[name].base]

    def __contains__(self, name: object) -> bool:
        """Returns whether new requests of this name are served."""
        return super().__contains__(name) or (name in self.adapters and not self.adapters[str(name)].leaving)

    @property
    def bases(self) -> dict[str, str]:
        """The base of each adapter."""
        return {name: adapter.base for name, adapter in self.adapters.items()}

    @property
    def cards(self) -> dict[str, ModelCard]:
        """The cards of all models, adapters included."""
        cards = {name: queue.card for name, queue in self.items()}
        for name, one in self.adapters.items():
            if not one.leaving:
                own = {"name": name, "path": one.spec.path, "parent": one.base}
                cards[name] = msgspec.structs.replace(cards[one.base], **own)
        return cards

    def of_base(self, body: Body) -> Body:
        """Returns the body with the base for its model, for what an adapter shares with it: the tokenizer."""
        if body.model not in self.adapters:
            return body
        return msgspec.structs.replace(body, model=self.adapters[body.model].base)  # type: ignore[type-var]

    def salted(self, body: Body) -> Body:
        """Returns the body with the salt by which its prefixes are cached: an adapter has its own, because it
        has K and V of its own."""
        if body.model not in self.adapters:
            return body
        salt = adapter_salt(body.model, self.adapters[body.model].digest, body.salt)
        return msgspec.structs.replace(body, salt=salt)  # type: ignore[type-var]


def make_pool_and_queues(
    executor: Executor, spec: EngineSpec, clock: Clock, *, reserved: int, record: Recorder = nobody
) -> tuple[Pool, ModelQueues]:
    """Returns a pool over the executor's blocks, and a queue for each model. reserved: a cache's rows beyond
    those of sequences that run; record: takes preemptions to the journal."""
    _tell_waste(executor.geometries)
    weights = {} if executor.weights is None else executor.weights.blocks
    proven = {} if executor.adapters is None else executor.adapters.proven
    kept = _kept_for_adapters(proven, executor.blocks)
    cards = {
        name: limit_context(card, executor.geometries[name], executor.blocks - kept - weights.get(name, 0))
        for name, card in executor.cards.items()
    }
    pool = Pool(
        executor.blocks,
        executor.geometries,
        max_sequences=spec.max_running + reserved + (MOST_ROWS if spec.drafting else 0),
        max_tokens={name: card.context_length for name, card in cards.items()},
    )
    shares = {model.name: _planned_shares(model, executor.compute) for model in spec.models}
    slos = {model.name: model.slo for model in spec.models}
    rates = {model.name: model.rate or 0.0 for model in spec.models}
    queues = {
        name: (ModelQueue if card.task == "generate" else PoolingQueue)(
            card,
            pool.caches[name],
            spec.max_running,
            spec.max_waiting,
            shares.get(name, (0, 0)),
            slos.get(name, Slo()),
            clock,
            rates.get(name, 0.0),
            record,
        )
        for name, card in cards.items()
    }
    return pool, ModelQueues(queues, spec.models, proven)


def _kept_for_adapters(proven: Mapping[str, ProvenAdapter], total: int) -> int:
    """Returns the number of blocks that no single request may have, because adapters need room beside it: the
    blocks of all adapters, up to one part in `ADAPTED` of the pool, but at least those of the largest
    adapter. Raises ConfigError if those are more than half of the pool."""
    largest = max(proven, key=lambda name: proven[name].blocks, default=None)
    if largest is None:
        return 0
    least = proven[largest].blocks
    if 2 * least > total:
        raise ConfigError(
            f"models.{largest}: its weights take {least} blocks, and the pool has {total}; twice as many as "
            "the largest adapter takes are right (kv_memory, or memory)"
        )
    return max(least, min(sum(one.blocks for one in proven.values()), total // ADAPTED))


def limit_context(card: ModelCard, geometry: Geometry, blocks: int) -> ModelCard:
    """Returns the card with a context of at most the tokens that so many blocks hold; logs if that is less
    than the model's own."""
    most = blocks // geometry.blocks_per_page * geometry.tokens_per_block
    if most >= card.context_length:
        return card
    _log.warning(
        "the context of %s is %d tokens, not %d: more do not fit into the pool (kv_memory, or memory)",
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
