"""Law 2 with the kernels that a GPU runs, in Triton's interpreter; on a GPU, where there is one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from kvloom.exec.cuda.layers import DeviceGatedMLP, DeviceNorm
from kvloom.exec.cuda.operations import triton_operations
from tests import interpreter
from tests.checkpoints import make_checkpoint
from tests.engines import ask, body, spec_of
from tests.exec.cuda.devices import one_lane
from tests.exec.cuda.engines import running_on_device
from tests.oracle import Oracle

COUNT = 3


@pytest.mark.skipif(not interpreter.INSTALLED, reason="triton is not installed: pip install '.[gpu]'")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu does this on the device")
def test_triton_kernels_give_transformers_own_tokens(tmp_path: Path) -> None:
    """Two sequences of one prefill, a third whose prompt is cached in part, decode steps that are padded."""
    path = make_checkpoint(tmp_path, "mistral", num_hidden_layers=2)
    shared = [(5 * j) % 250 for j in range(26)]  # past the window of 24, and two chunks
    prompts = [shared, [9, 8, 7], [*shared[:24], 1]]

    async def serve() -> list[list[int]]:
        spec = spec_of({"m": path}, max_running=2, chunk_tokens=13)
        async with running_on_device(spec, one_lane(), triton_operations()) as (engine, executor):
            kinds = [type(module) for module in executor._models["m"].module.modules()]
            assert (kinds.count(DeviceNorm), kinds.count(DeviceGatedMLP)) == (5, 2)
            first = [ask(engine, body("m", prompt, max_tokens=COUNT)) for prompt in prompts[:2]]
            answers = [
                *await asyncio.gather(*first),
                await ask(engine, body("m", prompts[2], max_tokens=COUNT)),
            ]
            assert answers[2].ends[0].cached_tokens == 24
            return [answer.tokens[0] for answer in answers]

    interpreter.load()
    with interpreter.interpreting():
        found = asyncio.run(serve())
    oracle = Oracle(path)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert len(tokens) == COUNT
        oracle.check(prompt, tokens)
