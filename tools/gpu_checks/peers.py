"""64 requests at once: this engine's executor against transformers' own continuous batching."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import numpy as np
import torch
from tools.gpu_checks.asking import answered
from tools.gpu_checks.models import LLAMA_8B, make_module, running, spec_of
from tools.gpu_checks.report import Figure, Report
from transformers import GenerationConfig

from kvloom.core.request import StartGenerate
from kvloom.core.sampling import SamplingParams
from kvloom.model.gpu.executor import GpuExecutor

OURS = "64 requests at once, kvloom's engine"
THEIRS = "64 requests at once, transformers' continuous batching"
_REQUESTS, _PROMPT, _OUTPUT = 64, 256, 64
_CHUNK = 4096


def prompts() -> list[list[int]]:
    random, vocabulary = np.random.default_rng(0), LLAMA_8B.form["vocab_size"]
    return [random.integers(vocabulary, size=_PROMPT).tolist() for _ in range(_REQUESTS)]


def ours(executor: GpuExecutor) -> Iterator[Figure]:
    """With scheduling and accounting, without HTTP."""
    tokens, seconds = asyncio.run(_serve(executor))
    assert tokens == _REQUESTS * _OUTPUT, f"{tokens} tokens"
    yield _figure(OURS, seconds)


def transformers_own() -> Iterator[Figure]:
    """`generate_batch` over paged attention, as transformers sets it up."""
    module = make_module(LLAMA_8B, torch.device("cuda"), torch.bfloat16, "sdpa")
    config = GenerationConfig(
        max_new_tokens=_OUTPUT, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=True
    )
    given = prompts()
    with torch.inference_mode():
        module.generate_batch(inputs=given[:2], generation_config=config)  # type: ignore[operator]
        began = time.perf_counter()
        found = module.generate_batch(inputs=given, generation_config=config)  # type: ignore[operator]
        seconds = time.perf_counter() - began
    made = sum(len(one.generated_tokens) for one in found.values())
    assert made == _REQUESTS * _OUTPUT, f"{made} tokens"
    yield _figure(THEIRS, seconds)


def against_transformers(report: Report) -> Iterator[Figure]:
    """Of what both have been measured to make. Raises LookupError where one has not."""
    mine, other = report.figure(OURS), report.figure(THEIRS)
    if mine is None or other is None:
        raise LookupError("one of the two has not been measured")
    yield Figure(name=f"{OURS} / transformers", value=mine.value / other.value, unit="×", least=3.0)


async def _serve(executor: GpuExecutor) -> tuple[int, float]:
    [model] = executor.cards
    params = SamplingParams(max_tokens=_OUTPUT, seed=0)
    async with running(executor, spec_of(executor, "adbs", max_running=128, chunk=_CHUNK)) as engine:
        began = time.perf_counter()
        counts = await asyncio.gather(
            *(
                answered(engine, StartGenerate(model=model, request=str(i), prompt=prompt, sampling=params))
                for i, prompt in enumerate(prompts())
            )
        )
        return sum(counts), time.perf_counter() - began


def _figure(name: str, seconds: float) -> Figure:
    return Figure(name=name, value=_REQUESTS * _OUTPUT / seconds, unit="tokens/s", note=f"{seconds:.2f} s")
