"""Decode steps against the memory's bandwidth, and a long prefill against the rate of products."""

from __future__ import annotations

import statistics

from tools.gpu_checks.ceilings import bandwidth, products
from tools.gpu_checks.llama import Jobs, parameters
from tools.gpu_checks.report import Figure

from kvloom.core.job import Phase

_CONTEXT = 1024
_PROMPT = 8192
_KV_BYTES = 32 * 8 * 128 * 2 * 2  # a token's K and V


def decode_steps(jobs: Jobs) -> list[Figure]:
    """From launch to tokens, in jobs of one step and of as many as an engine's have; the bound reads every
    weight and every K and V once."""
    rate = bandwidth()
    figures = []
    for batch in (1, 32, 128):
        floor = (2 * parameters() + batch * _CONTEXT * _KV_BYTES) / rate
        for steps, times in ((jobs.executor.stride, 5), (1, 20)):
            with jobs.sequences(batch, _CONTEXT) as ids:
                found = statistics.median(jobs.seconds(Phase.DECODE, ids, 1, times, steps))
            name = f"decode step, batch {batch}, context {_CONTEXT}, {steps} a job"
            figures.append(_against(name, found, floor, "the bandwidth"))
    return figures


def long_prefill(jobs: Jobs) -> list[Figure]:
    """A prompt in one job; the bound is its products at the rate of a large one, causal attention counted
    by half."""
    rate = products()
    with jobs.sequences(1, 0) as ids:
        found = statistics.median(jobs.seconds(Phase.PREFILL, ids, _PROMPT, 5))
    attention = 4 * 32 * 32 * 128 * _PROMPT * _PROMPT / 2
    floor = (2 * parameters() * _PROMPT + attention) / rate
    return [_against(f"prefill of {_PROMPT} tokens", found, floor, "the products' rate")]


def _against(name: str, found: float, floor: float, of: str) -> Figure:
    """floor: the seconds that the device allows, by `of` it."""
    note = f"{floor / found:.0%} of {of}"
    return Figure(name=name, value=found * 1e3, unit="ms", bound=floor * 1e3, note=note)
