"""Decode steps and prefills of one executor, without an engine, against what the device allows: the bandwidth
of its memory and its rate of bfloat16 products. Decode steps beside prefills, too, in complementary
partitions and in one stream."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tools.gpu_checks.models import parameters
from tools.gpu_checks.report import Figure

from kvloom.exec.cuda.executor import GpuExecutor
from kvloom.exec.loader import LoadedModel
from kvloom.kv.pool import Pool
from kvloom.types.job import Job, JobResult, Phase, SampleRow
from kvloom.types.request import SamplingParams

_BYTES = 2 << 30
_SIZE = 8192


def timed(work: Callable[[], object], times: int = 10) -> float:
    """Seconds on the device, the median of several."""
    work()
    found: list[float] = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1000)
    return statistics.median(found)


def bandwidth() -> float:
    """Bytes a second of a large copy, reads and writes counted."""
    source = torch.empty(_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * _BYTES / timed(lambda: target.copy_(source))


def products() -> float:
    """Floating point operations a second of a large product in bfloat16."""
    a, b = (torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * _SIZE**3 / timed(lambda: a @ b)


def ceilings() -> list[Figure]:
    return [
        Figure(name="copy of 2 GiB, reads and writes", value=bandwidth() / 1e9, unit="GB/s"),
        Figure(name=f"bfloat16 product of {_SIZE}³", value=products() / 1e12, unit="TFLOP/s"),
    ]


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


_CONTEXT = 1024
_PROMPT = 8192
_OF_BANDWIDTH, _OF_PRODUCTS = 0.8, 0.65  # that are wanted


def decode_steps(jobs: Jobs, model: LoadedModel) -> Iterator[Figure]:
    """From launch to tokens, in jobs of one step and of as many as an engine's have; the bound reads every
    weight and every K and V once."""
    rate = bandwidth()
    token = model.geometry.token_bytes * model.geometry.blocks_per_page
    for batch in (1, 32, 128):
        floor = (model.kv_dtype.itemsize * parameters(model) + batch * _CONTEXT * token) / rate
        for steps, times in ((jobs.executor.max_steps, 5), (1, 20)):
            with jobs.sequences(batch, _CONTEXT) as ids:
                found = statistics.median(jobs.seconds(Phase.DECODE, ids, 1, times, steps))
            name = f"decode step, batch {batch}, context {_CONTEXT}, {steps} a job"
            yield _against(name, found, floor, _OF_BANDWIDTH, "the bandwidth")


def long_prefill(jobs: Jobs, model: LoadedModel) -> Iterator[Figure]:
    """A prompt in one job; the bound is its products at the rate of a large one: those of the head for one
    row alone, causal attention counted by half."""
    rate = products()
    with jobs.sequences(1, 0) as ids:
        found = statistics.median(jobs.seconds(Phase.PREFILL, ids, _PROMPT, 5))
    config: Any = model.module.config
    layers = parameters(model) - config.vocab_size * config.hidden_size
    attention = 4 * model.geometry.layers * model.heads * model.geometry.head_dim * _PROMPT * _PROMPT / 2
    floor = (2 * layers * _PROMPT + attention) / rate
    yield _against(f"prefill of {_PROMPT} tokens", found, floor, _OF_PRODUCTS, "the products' rate")


def _against(name: str, found: float, floor: float, wanted: float, of: str) -> Figure:
    """floor: the seconds that the device allows, by `of` it; wanted: that part of it."""
    note = f"{floor / found:.0%} of {of}"
    most = floor / wanted * 1e3
    return Figure(name=name, value=found * 1e3, unit="ms", bound=floor * 1e3, most=most, note=note)


_BATCH = 32
_CHUNK = 2048
_STEPS = 150


def beside(jobs: Jobs) -> Iterator[Figure]:
    """P99 of the time from a decode job's launch to its tokens."""
    compute, tails = jobs.executor.compute, list[float]()
    for name, share, other in (
        ("in one stream", compute, compute),
        ("in complementary partitions", compute // 2, compute - compute // 2),
    ):
        with jobs.sequences(_BATCH, _CONTEXT) as decoding, jobs.sequences(1, 0) as prompt:
            steps, prefills, elapsed = asyncio.run(
                play(jobs, decoding, prompt, share, other, chunk=_CHUNK, steps=_STEPS)
            )
        tails.append(_p99(steps))
        yield Figure(name=f"decode step P99 beside prefills, {name}", value=tails[-1] * 1e3, unit="ms")
        rate = prefills * _CHUNK / elapsed
        yield Figure(name=f"prefill beside them, {name}", value=rate, unit="tokens/s")
    what = "decode step P99 beside prefills, one stream / partitions"
    yield Figure(name=what, value=tails[0] / tails[1], unit="×", least=3.0)


async def play(
    jobs: Jobs, decoding: list[int], prompt: list[int], share: int, other: int, *, chunk: int, steps: int
) -> tuple[list[float], int, float]:
    """Seconds of decode steps, the first two left out; prefill jobs beside them; seconds in all."""
    loop = asyncio.get_running_loop()
    found: list[float] = []
    ended = asyncio.Event()

    async def prefill() -> int:
        count = 0
        while not ended.is_set():
            await jobs.run(Phase.PREFILL, other, prompt, chunk)
            count += 1
        return count

    began = loop.time()
    beside = asyncio.create_task(prefill())
    for _ in range(steps):
        at = loop.time()
        await jobs.run(Phase.DECODE, share, decoding, 1)
        found.append(loop.time() - at)
    ended.set()
    prefills = await beside
    return found[2:], prefills, loop.time() - began


def _p99(values: list[float]) -> float:
    return float(np.percentile(values, 99))
