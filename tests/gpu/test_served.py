"""Law 2 on a GPU: recorded steps in partitions, the same tokens as transformers' own."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from kvloom.exec.cuda.loader import load_gpu_executor
from kvloom.types.errors import ConfigError
from kvloom.types.spec import EngineSpec
from tests.checkpoints import VOCAB, WINDOW, make_checkpoint
from tests.engines import ask, body, spec_of
from tests.exec.cuda.engines import running_executor
from tests.exec.packing import FORMATS, quantise, twin
from tests.oracle import Oracle

LENGTHS = (1, 3, 17, WINDOW + 1, 90, 130)
COUNT = 12


def spec(paths: dict[str, Path], kv_bytes: int = 4 << 20) -> EngineSpec:
    """In float32, so that the tie rule holds."""
    made = spec_of(paths, max_running=8, kv_bytes=kv_bytes)
    return replace(made, device="cuda:0", models=tuple(replace(one, dtype="float32") for one in made.models))


async def greedy(path: Path, seed: str) -> list[tuple[list[int], list[int]]]:
    """Returns drawn prompts, and the tokens that a unit makes of each if all come at once."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
    wanted = spec({"m": path})
    async with running_executor(wanted, load_gpu_executor(wanted)) as engine:
        answers = await asyncio.gather(*(ask(engine, body("m", p, max_tokens=COUNT)) for p in prompts))
    return [(prompt, answer.tokens[0]) for prompt, answer in zip(prompts, answers, strict=True)]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gemma2", "gpt_neox", "mixtral"])
def test_greedy_is_transformers_own(architecture: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, architecture)
    oracle = Oracle(path)
    for prompt, tokens in asyncio.run(greedy(path, architecture)):
        assert len(tokens) == COUNT
        oracle.check(prompt, tokens)


@pytest.mark.parametrize("form", ["packed 4", "awq row", "gptq 8", "floats"])
def test_weights_of_few_bits(form: str, tmp_path: Path) -> None:
    """The tokens of the plain checkpoint of these numbers."""
    if form == "floats" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("GPUs have FP8 from compute capability 8.9 on")
    (tmp_path / "model").mkdir()
    path = make_checkpoint(tmp_path / "model", "qwen2")
    quantise(path, FORMATS[form])
    oracle = Oracle(twin(path))
    for prompt, tokens in asyncio.run(greedy(path, form)):
        oracle.check(prompt, tokens)


def test_two_models_side_by_side(tmp_path: Path) -> None:
    """In complementary partitions, at the same time, again and again."""
    paths = {
        name: make_checkpoint(tmp_path / name, kind) for name, kind in (("a", "qwen3"), ("b", "mistral"))
    }
    prompts = [[(7 * i + j) % VOCAB for j in range(20 + i)] for i in range(24)]

    async def serve() -> dict[str, list[list[int]]]:
        wanted = spec(paths)
        async with running_executor(wanted, load_gpu_executor(wanted)) as engine:
            asked = [ask(engine, body(name, p, max_tokens=COUNT)) for p in prompts for name in paths]
            answers = [answer.tokens[0] for answer in await asyncio.gather(*asked)]
            return {name: answers[i :: len(paths)] for i, name in enumerate(paths)}

    found = asyncio.run(serve())
    for name, path in paths.items():
        oracle = Oracle(path)
        for prompt, tokens in zip(prompts, found[name], strict=True):
            oracle.check(prompt, tokens)


def test_the_costliest_jobs_take_no_more_than_was_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of what torch holds, on both sides of a partition. Where others use the device, nothing else can be
    told."""
    caplog.set_level(logging.INFO, "kvloom.exec.cuda.loader")
    path = make_checkpoint(tmp_path, "qwen3")
    costly: dict[str, Any] = {
        "temperature": 1.0,
        "logprobs": 20,
        "prompt_logprobs": 20,
        "logit_bias": {3: 1.0},
    }
    prompts = [[(7 * i + j) % VOCAB for j in range(60 + i % 5)] for i in range(24)]

    async def serve() -> tuple[int, set[str]]:
        wanted = spec({"m": path})
        executor = load_gpu_executor(wanted)
        executor.device.settle()
        executor.device.trim()
        kept = executor.device.held()
        torch.cuda.reset_peak_memory_stats()
        async with running_executor(wanted, executor) as engine:
            answers = await asyncio.gather(
                *(ask(engine, body("m", p, max_tokens=9, **costly)) for p in prompts)
            )
        return torch.cuda.max_memory_reserved() - kept, {answer.ends[0].reason for answer in answers}

    taken, reasons = asyncio.run(serve())
    assert reasons == {"length"}
    [told] = [one.message for one in caplog.records if "the pool gets" in one.message]
    need = re.search(r"jobs need ([\d,]+)", told)
    assert need is not None
    assert taken <= int(need[1].replace(",", "")), told


def test_a_pool_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match="beside a pool of 1,099,511,627,776, and"):
        load_gpu_executor(spec({"m": path}, kv_bytes=1 << 40))


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match="there is no cuda:63"):
        load_gpu_executor(replace(spec({"m": path}), device="cuda:63"))
