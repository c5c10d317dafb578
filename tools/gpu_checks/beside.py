"""Decode steps beside prefills: in complementary partitions, and in one stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
from tools.gpu_checks.jobs import Jobs
from tools.gpu_checks.report import Figure

from kvloom.types.job import Phase

_BATCH = 32
_CONTEXT = 1024
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
