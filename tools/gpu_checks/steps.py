"""Decode steps against the memory's bandwidth, and a long prefill against the rate of products."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from tools.gpu_checks.ceilings import bandwidth, products
from tools.gpu_checks.jobs import Jobs
from tools.gpu_checks.models import parameters
from tools.gpu_checks.report import Figure

from kvloom.exec.loader import LoadedModel
from kvloom.types.job import Phase

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
