"""A model of Llama-3-8B's shape with random weights, made on the device, and jobs for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvloom.core.geometry import Geometry
from kvloom.core.job import Job, JobResult, Phase, SampleRow
from kvloom.core.request import ModelCard
from kvloom.core.sampling import SamplingParams
from kvloom.kv.pool import Pool
from kvloom.model.attention import NAME
from kvloom.model.forward import Modular
from kvloom.model.gpu.arena import DeviceArena
from kvloom.model.gpu.device import Device
from kvloom.model.gpu.executor import GpuExecutor
from kvloom.model.gpu.fusing import fuse_on_device
from kvloom.model.gpu.model import DeviceModel
from kvloom.model.gpu.operations import Operations
from kvloom.model.loader import LoadedModel

BLOCK_BYTES = 16 << 10
CONTEXT = 16384
VOCABULARY = 128256
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}


def make_module(attention: str = "eager") -> torch.nn.Module:
    with torch.device("cuda"):
        module = AutoModelForCausalLM.from_config(
            LlamaConfig(**SHAPE), dtype=torch.bfloat16, attn_implementation=attention
        )
    made: torch.nn.Module = module.eval().requires_grad_(False)
    return made


def load(device: Device, operations: Operations, *, kv_bytes: int, most_running: int) -> GpuExecutor:
    module = make_module()
    module.set_attn_implementation(NAME)  # type: ignore[operator]
    fuse_on_device(module, operations)
    geometry = Geometry(32, 8, 128, 2, BLOCK_BYTES)
    loaded = LoadedModel(module, Modular(module), torch.bfloat16, geometry, _card(module))
    arena = DeviceArena(kv_bytes // BLOCK_BYTES, BLOCK_BYTES, device.torch)
    executor = GpuExecutor({"m": DeviceModel.place(loaded, arena, operations)}, arena, device)
    executor.prepare(most_running=most_running, chunk=8192, progress=lambda text: print(f"   {text}"))
    return executor


def parameters() -> int:
    """That a step reads: all but the embedding's table."""
    size, inner, wide = 4096, 14336, (32 + 2 * 8) * 128
    layer = size * wide + size * size + 3 * size * inner + 2 * size
    return 32 * layer + size + VOCABULARY * size


class Jobs:
    """The same jobs again and again: sequences do not grow, and what they hold is taken as computed."""

    def __init__(self, executor: GpuExecutor, most: int) -> None:
        self.executor = executor
        card = executor.cards["m"]
        limit = {"m": card.context_length}
        self._vocabulary = card.vocab_size
        self._pool = Pool(executor.blocks, executor.geometries, max_sequences=most, max_tokens=limit)
        self._next = 0

    @contextmanager
    def sequences(self, count: int, tokens: int) -> Iterator[list[int]]:
        """`count` sequences of `tokens` tokens."""
        cache, ids = self._pool.caches["m"], list(range(self._next, self._next + count))
        self._next += count
        for one in ids:
            cache.add_sequence(one)
        if tokens:
            cache.end_forward(cache.begin_forward(ids, [tokens] * count))
        yield ids
        for one in ids:
            cache.remove_sequence(one)

    async def run(
        self, phase: Phase, share: int, ids: Sequence[int], appends: int, steps: int = 1
    ) -> JobResult:
        cache = self._pool.caches["m"]
        plan = cache.begin_forward(list(ids), [appends] * len(ids), steps if steps > 1 else 0)
        tokens = np.random.default_rng(0).integers(self._vocabulary, size=appends * len(ids))
        params = SamplingParams(max_tokens=1, seed=0)
        rows = tuple(SampleRow((i + 1) * appends - 1, i, 0, params) for i in range(len(ids)))
        try:
            return await self.executor.launch(Job("m", phase, share, plan, tokens, rows, steps=steps))
        finally:
            cache.abort_forward(plan)

    def seconds(
        self, phase: Phase, ids: Sequence[int], appends: int, times: int, steps: int = 1
    ) -> list[float]:
        """Of a step of jobs on the whole device, the first two left out."""

        async def repeat() -> list[float]:
            given = phase, self.executor.compute, ids, appends, steps
            found = [await self.run(*given) for _ in range(times + 2)]
            return [one.seconds / steps for one in found[2:]]

        return asyncio.run(repeat())


def _card(module: torch.nn.Module) -> ModelCard:
    return ModelCard(
        name="m",
        path="random",
        context_length=CONTEXT,
        vocab_size=VOCABULARY,
        tokenizer="",
        chat_template=None,
        special_tokens={},
        eos_token_ids=(),
        bos_token_id=None,
        add_bos=False,
        architecture=type(module).__name__,
        parameters=sum(one.numel() for one in module.parameters()),
        dtype="bfloat16",
    )
