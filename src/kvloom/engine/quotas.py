"""The quotas of a unit's models: how models use theirs, and how blocks move between them (MuxServe,
algorithm 3, last line)."""

from __future__ import annotations

from collections.abc import Mapping

from kvloom.engine.model_queue import ModelQueue
from kvloom.kv.pool import Pool
from kvloom.kv.quota import (
    QuotaUsage,
    SequenceUse,
    adapt_quotas,
    initial_caps,
    initial_quotas,
    move_caps,
)
from kvloom.types.clock import Clock
from kvloom.types.spec import EngineSpec

_PERIOD = 8.0  # seconds, MuxServe's


class QuotaTuner:
    """Measures how models use their quotas, and adapts them. Pooling models have none."""

    def __init__(self, queues: Mapping[str, ModelQueue], spec: EngineSpec, pool: Pool, clock: Clock) -> None:
        self._queues = queues = {
            name: queue for name, queue in queues.items() if queue.card.task == "generate"
        }
        self._pool = pool
        total = pool.total
        self._quotas: dict[str, int] = {}
        """The quotas of the models while weights take none of the pool."""
        self._clock = clock
        self._moves = spec.quotas == "adaptive" and bool(queues)
        self._changed = set(queues.values())
        self._held = dict.fromkeys(queues.values(), 0)  # blocks, as was last observed
        if self._moves:
            for queue in queues.values():
                queue.watchers.append(self._changed)
        geometries = {name: queue.cache.geometry for name, queue in queues.items()}
        rates = {model.name: model.rate for model in spec.models if model.name in geometries}
        quotas = {model.name: model.quota for model in spec.models if model.name in geometries}
        self._set(
            (initial_quotas(total, geometries, rates) if geometries else {})
            | {name: int(quota * total) for name, quota in quotas.items() if quota is not None}
        )
        self._begin()

    def _begin(self) -> None:
        self._due = self._clock.now() + _PERIOD
        self._jobs = 0
        self._correction = dict.fromkeys(self._held, 0)
        """A correction by model: held · jobs + correction is the sum over the period's jobs of the blocks
        that were held, though models that did nothing are not visited."""

    def observe(self, jobs: int) -> None:
        """Notes how many blocks each model holds when `jobs` jobs have ended."""
        for queue in self._changed:
            held = queue.cache.used_blocks
            self._correction[queue] += (self._held[queue] - held) * self._jobs
            self._held[queue] = held
        self._changed.clear()
        self._jobs += jobs

    def adapt(self) -> None:
        """Moves quotas towards use, once a period at most, and only if a job ran in it."""
        if not self._moves or self._jobs == 0 or self._clock.now() < self._due:
            return
        usage = {
            name: QuotaUsage(self._used(queue) / self._jobs, queue.blocks(queue.waiting, to_end=True))
            for name, queue in self._queues.items()
        }
        self._set(adapt_quotas(self._pool.total, self._quotas, usage))
        self._begin()

    def resize(self) -> None:
        """Scales the quotas from the whole pool down to the room that weights leave to K and V; each quota
        holds a page at least."""
        room, total = self._pool.room, self._pool.total
        for name, queue in self._queues.items():
            queue.quota = max(self._quotas[name] * room // total, queue.cache.geometry.blocks_per_page)
            queue.changed()

    def _used(self, queue: ModelQueue) -> int:
        """Returns the blocks that the jobs of this period have seen, summed over them."""
        return self._held[queue] * self._jobs + self._correction[queue]

    def _set(self, quotas: Mapping[str, int]) -> None:
        self._quotas.update(quotas)
        if self._pool.weights:
            self.resize()
            return
        for name, quota in quotas.items():
            self._queues[name].quota = quota
            self._queues[name].changed()


class SequenceTuner(QuotaTuner):
    """Bounds how many sequences of each model run, as the code that was published with MuxServe does."""

    def __init__(self, queues: Mapping[str, ModelQueue], spec: EngineSpec, pool: Pool, clock: Clock) -> None:
        super().__init__(queues, spec, pool, clock)
        self._most = spec.max_running
        self._geometries = {name: queue.cache.geometry for name, queue in self._queues.items()}
        self._moves_caps = spec.quotas == "sequences"
        self._ran = dict.fromkeys(self._queues, 0)  # summed over jobs
        self._cap(initial_caps(self._quotas, self._geometries))

    def observe(self, jobs: int) -> None:
        """Notes how many sequences each model runs when `jobs` jobs have ended."""
        self._jobs += jobs
        for name, queue in self._queues.items():
            self._ran[name] += len(queue.running) * jobs

    def adapt(self) -> None:
        """Moves the bounds, once a period in which jobs ran."""
        if not self._moves_caps or self._jobs == 0 or self._clock.now() < self._due:
            return
        use = {
            name: SequenceUse(self._ran[name] / self._jobs, len(queue.running) + len(queue.waiting))
            for name, queue in self._queues.items()
        }
        self._cap(move_caps(self._caps, use, self._geometries))
        self._ran = dict.fromkeys(self._queues, 0)
        self._begin()

    def _cap(self, caps: Mapping[str, int]) -> None:
        self._caps = dict(caps)
        for name, queue in self._queues.items():
            queue.max_running = min(self._most, caps[name])
            queue.changed()


def quota_tuner(queues: Mapping[str, ModelQueue], spec: EngineSpec, pool: Pool, clock: Clock) -> QuotaTuner:
    """Returns the tuner that the specification's quotas want."""
    kind = SequenceTuner if spec.quotas in ("sequences", "fixed-sequences") else QuotaTuner
    return kind(queues, spec, pool, clock)
