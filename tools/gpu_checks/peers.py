"""64 requests at once: this engine's executor against transformers' own continuous batching."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import torch
from tools.gpu_checks.llama import BLOCK_BYTES, VOCABULARY, make_module
from tools.gpu_checks.report import Figure
from transformers import GenerationConfig

from kvloom.core.clock import WallClock
from kvloom.core.request import EndEvent, StartGenerate, TokenEvent
from kvloom.core.sampling import SamplingParams
from kvloom.core.spec import EngineSpec, ModelSpec
from kvloom.engine.engine import Engine
from kvloom.kv.arena import Arena
from kvloom.model.gpu.executor import GpuExecutor
from kvloom.transport.shm import ShmTransport

_REQUESTS, _PROMPT, _OUTPUT = 64, 256, 64


def prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(VOCABULARY, size=_PROMPT).tolist() for _ in range(_REQUESTS)]


def ours(executor: GpuExecutor) -> list[Figure]:
    """With scheduling and accounting, without HTTP."""
    tokens, seconds = asyncio.run(_serve(executor))
    assert tokens == _REQUESTS * _OUTPUT, f"{tokens} tokens"
    return [_figure("64 requests at once, kvloom's engine", seconds)]


def transformers_own() -> list[Figure]:
    """`generate_batch` over paged attention, as transformers sets it up."""
    torch.cuda.empty_cache()  # of what was measured before
    module = make_module("sdpa")
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
    return [_figure("64 requests at once, transformers' continuous batching", seconds)]


async def _serve(executor: GpuExecutor) -> tuple[int, float]:
    spec = EngineSpec(
        models=(ModelSpec(name="m", path="random"),),
        kv_bytes=executor.blocks * BLOCK_BYTES,
        block_bytes=BLOCK_BYTES,
        policy="adbs",
        max_running=128,
        max_waiting=256,
        chunk_tokens=4096,
        threads=1,
    )
    transport = ShmTransport(spec.unit, Arena(1, BLOCK_BYTES))
    engine = Engine(executor, transport, spec, WallClock())
    running = asyncio.create_task(engine.run())
    began = time.perf_counter()
    counts = await asyncio.gather(*(_ask(engine, i, prompt) for i, prompt in enumerate(prompts())))
    seconds = time.perf_counter() - began
    await engine.stop()
    await running
    transport.close_all()
    return sum(counts), seconds


async def _ask(engine: Engine, number: int, prompt: list[int]) -> int:
    params = SamplingParams(max_tokens=_OUTPUT, seed=0)
    count = 0
    async for frame in engine.start_generate(
        StartGenerate(model="m", request=str(number), prompt=prompt, sampling=params)
    ):
        count += sum(isinstance(event, TokenEvent) for event in frame)
        failed = [event.message for event in frame if isinstance(event, EndEvent) and event.reason == "error"]
        assert not failed, failed
    return count


def _figure(name: str, seconds: float) -> Figure:
    return Figure(name=name, value=_REQUESTS * _OUTPUT / seconds, unit="tokens/s", note=f"{seconds:.2f} s")
