"""Watches how models use their quotas and moves blocks between them (MuxServe, algorithm 3, last line)."""

from __future__ import annotations

from collections.abc import Mapping

from kvloom.core.clock import Clock
from kvloom.core.spec import EngineSpec
from kvloom.engine.model_queue import ModelQueue
from kvloom.kv.quota import Usage, adapt_quotas, initial_quotas

_PERIOD = 8.0  # seconds, MuxServe's


class QuotaTuner:
    def __init__(self, queues: Mapping[str, ModelQueue], spec: EngineSpec, total: int, clock: Clock) -> None:
        self._queues = queues
        self._total = total
        self._clock = clock
        self._moves = spec.quotas == "adaptive"
        geometries = {name: queue.cache.geometry for name, queue in queues.items()}
        self._set(
            initial_quotas(total, geometries, {model.name: model.rate for model in spec.models})
            | {model.name: int(model.quota * total) for model in spec.models if model.quota is not None}
        )
        self._begin()

    def _begin(self) -> None:
        self._due = self._clock.now() + _PERIOD
        self._used = dict.fromkeys(self._queues, 0)
        self._jobs = 0

    def observe(self, jobs: int) -> None:
        """So many jobs have ended: note who holds what."""
        self._jobs += jobs
        for name, queue in self._queues.items():
            self._used[name] += jobs * queue.cache.used_blocks

    def adapt(self) -> None:
        """Once a period in which jobs ran, move quotas towards use."""
        if not self._moves or self._jobs == 0 or self._clock.now() < self._due:
            return
        usage = {
            name: Usage(self._used[name] / self._jobs, queue.blocks(queue.waiting, to_end=True))
            for name, queue in self._queues.items()
        }
        self._set(adapt_quotas(self._total, {n: q.quota for n, q in self._queues.items()}, usage))
        self._begin()

    def _set(self, quotas: Mapping[str, int]) -> None:
        for name, quota in quotas.items():
            self._queues[name].quota = quota
