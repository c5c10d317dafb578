"""Jobs for an executor, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvloom.exec.cuda.executor import GpuExecutor
from kvloom.kv.pool import Pool
from kvloom.types.job import Job, JobResult, Phase, SampleRow
from kvloom.types.request import SamplingParams


class Jobs:
    """Of the executor's one model, the same again and again: sequences do not grow, and what they hold is
    taken as computed."""

    def __init__(self, executor: GpuExecutor, most: int) -> None:
        self.executor = executor
        [(self._model, card)] = executor.cards.items()
        limit = {self._model: card.context_length}
        self._vocabulary = card.vocab_size
        self._pool = Pool(executor.blocks, executor.geometries, max_sequences=most, max_tokens=limit)
        self._next = 0

    @contextmanager
    def sequences(self, count: int, tokens: int) -> Iterator[list[int]]:
        """`count` sequences of `tokens` tokens."""
        cache, ids = self._pool.caches[self._model], list(range(self._next, self._next + count))
        self._next += count
        for one in ids:
            cache.add_sequence(one)
        if tokens:
            cache.end_forward(cache.begin_forward(ids, [tokens] * count))
        yield ids
        for one in ids:
            cache.remove_sequence(one)

    @contextmanager
    def job(
        self, phase: Phase, share: int, ids: Sequence[int], appends: int, steps: int = 1
    ) -> Iterator[Job]:
        """A job that appends so many tokens to each sequence, all as before afterwards."""
        cache = self._pool.caches[self._model]
        plan = cache.begin_forward(list(ids), [appends] * len(ids), steps if steps > 1 else 0)
        tokens = np.random.default_rng(0).integers(self._vocabulary, size=appends * len(ids))
        params = SamplingParams(max_tokens=1, seed=0)
        rows = tuple(SampleRow((i + 1) * appends - 1, i, 0, params) for i in range(len(ids)))
        try:
            yield Job(self._model, phase, share, plan, tokens, rows, steps=steps)
        finally:
            cache.abort_forward(plan)

    async def run(
        self, phase: Phase, share: int, ids: Sequence[int], appends: int, steps: int = 1
    ) -> JobResult:
        with self.job(phase, share, ids, appends, steps) as job:
            return await self.executor.launch(job)

    def seconds(
        self, phase: Phase, ids: Sequence[int], appends: int, times: int, steps: int = 1
    ) -> list[float]:
        """Of a step of jobs on the whole device, the first two left out."""

        async def repeat() -> list[float]:
            given = phase, self.executor.compute, ids, appends, steps
            found = [await self.run(*given) for _ in range(times + 2)]
            return [one.seconds / steps for one in found[2:]]

        return asyncio.run(repeat())
