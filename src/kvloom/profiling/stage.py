"""Real jobs on the real executor, from plans that a real pool makes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np

from kvloom.engine.quotas import fitted
from kvloom.exec.cpu.executor import TorchExecutor
from kvloom.kv.pool import Pool
from kvloom.profiling.setting import Limits, Setting
from kvloom.types.job import Job, Phase, SampleRow
from kvloom.types.request import SamplingParams

MOST_SEQUENCES: Final = 1024


class Stage:
    """Jobs of a setting, again and again over the same sequences: none of them grows, and what they have is
    taken as computed, because time does not depend on what K and V are."""

    def __init__(self, executor: TorchExecutor, *, temperature: float) -> None:
        self._executor = executor
        self._cards = {
            name: fitted(card, executor.geometries[name], executor.blocks)
            for name, card in executor.cards.items()
        }
        self.pool = Pool(
            executor.blocks,
            executor.geometries,
            max_sequences=MOST_SEQUENCES,
            max_tokens={name: card.context_length for name, card in self._cards.items()},
        )
        self._params = SamplingParams(max_tokens=1, seed=0, temperature=temperature)
        self._ids = itertools.count()
        self._tokens = np.random.default_rng(0)
        executor.arena.bytes.zero_()  # so that no page of it is touched for the first time while time runs

    def limits(self, model: str, chunk: int, batch: int) -> Limits:
        """chunk, batch: of the engine; they bound what a job is asked to do."""
        geometry = self._executor.geometries[model]
        width = geometry.tokens_per_block
        tokens = self._executor.blocks // geometry.blocks_per_page * width
        context = self._cards[model].context_length
        return Limits(context, width, tokens, min(chunk, context), min(batch, MOST_SEQUENCES))

    @contextmanager
    def placed(self, setting: Setting) -> Iterator[list[int]]:
        """Sequences that have the setting's tokens, and are gone afterwards."""
        cache = self.pool.caches[setting.model]
        ids = [next(self._ids) for _ in setting.starts]
        for number in ids:
            cache.add_sequence(number)
        try:
            held = [(one, start) for one, start in zip(ids, setting.starts, strict=True) if start]
            if held:
                cache.end_forward(cache.begin_forward([one for one, _ in held], [n for _, n in held]))
            yield ids
        finally:
            for number in ids:
                cache.remove_sequence(number)

    async def run(self, setting: Setting, ids: list[int]) -> float:
        """Seconds of one job, from launch to result."""
        cache = self.pool.caches[setting.model]
        plan = cache.begin_forward(ids, setting.appends)
        tokens = self._tokens.integers(self._cards[setting.model].vocab_size, size=int(plan.appends.sum()))
        last = np.cumsum(plan.appends) - 1
        samples = tuple(
            SampleRow(row=int(row), key=number, index=0, params=self._params)
            for number, row in zip(ids, last, strict=True)
        )
        job = Job(setting.model, setting.phase, setting.cores, plan, tokens, samples)
        began = time.perf_counter()
        try:
            await self._executor.launch(job)
            return time.perf_counter() - began
        finally:
            cache.abort_forward(plan)  # the sequences are as before

    @staticmethod
    def told(setting: Setting) -> str:
        """For a progress bar."""
        context = sum(setting.starts) // len(setting.starts)
        what = f"{len(setting.starts)} sequences of {context}"
        if setting.phase is Phase.PREFILL:
            what = f"{sum(setting.appends)} tokens after {context}"
        return f"{setting.model} {setting.phase.value} {what}, {setting.cores} cores"
