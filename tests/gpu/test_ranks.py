"""Law 2 over two GPUs: sums and gathers by NCCL, in recorded steps too."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from kvloom.exec.cuda.parallel import load_parallel_gpu_executor
from tests.checkpoints import VOCAB, WINDOW, make_checkpoint
from tests.engines import ask, body
from tests.exec.cuda.engines import running_executor
from tests.gpu.test_served import COUNT, spec
from tests.oracle import Oracle

LENGTHS = (1, 17, WINDOW + 1, 90)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices here")
def test_two_ranks_give_transformers_own_tokens(tmp_path: Path) -> None:
    paths = {
        name: make_checkpoint(tmp_path / name, kind, num_key_value_heads=2)
        for name, kind in (("a", "qwen3"), ("b", "gemma2"))
    }
    rng = random.Random(0)
    prompts = {name: [[rng.randrange(VOCAB) for _ in range(n)] for n in LENGTHS] for name in paths}

    async def serve() -> dict[str, list[list[int]]]:
        wanted = replace(spec(paths), tensor_parallel=2)
        executor = load_parallel_gpu_executor(wanted)
        recorded = [[step.rows for step in steps._steps] for steps in executor._steps.values()]
        assert recorded == [[1, 2, 4, 8]] * 2
        async with running_executor(wanted, executor) as engine:
            asked = [ask(engine, body(name, p, max_tokens=COUNT)) for name in paths for p in prompts[name]]
            answers = [answer.tokens[0] for answer in await asyncio.gather(*asked)]
        return {name: answers[i * len(LENGTHS) :][: len(LENGTHS)] for i, name in enumerate(paths)}

    found = asyncio.run(serve())
    for name, path in paths.items():
        oracle = Oracle(path)
        for prompt, tokens in zip(prompts[name], found[name], strict=True):
            oracle.check(prompt, tokens)
