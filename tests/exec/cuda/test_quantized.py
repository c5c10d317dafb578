"""Checkpoints of few bits over the GPU's executor, which holds their codes: the tokens are those of the plain
checkpoint of the numbers that they stand for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import nn

from kvloom.exec.cuda.device import GpuDevice, host_device
from kvloom.exec.cuda.fuse import DeviceGatedMLP
from kvloom.exec.cuda.loader import DeviceTarget, load_executor
from kvloom.exec.cuda.operations import Operations, plain_operations, triton_operations
from kvloom.exec.cuda.quantized import DeviceQuantizedLinear
from kvloom.exec.fuse import MergedLinearPart
from kvloom.exec.loader import load_model
from kvloom.exec.quantized import QuantizedLinear, quantized
from kvloom.types.errors import ConfigError
from kvloom.types.spec import EngineSpec, ModelSpec
from tests import interpreter
from tests.checkpoints import VOCAB, make_checkpoint
from tests.engines import ask, body, spec_of
from tests.exec.cuda.devices import COMPUTE, one_lane
from tests.exec.cuda.engines import running_on_device
from tests.exec.loading import BLOCK
from tests.exec.packing import FORMATS, quantise, twin
from tests.ggufs import make_gguf
from tests.oracle import Oracle

LENGTHS = (1, 9, 70)


def exact(path: Path) -> EngineSpec:
    return msgspec.structs.replace(
        spec_of({}, max_running=4), models=(ModelSpec(name="m", path=str(path), dtype="float32"),)
    )


def greedy(
    path: Path,
    prompts: Sequence[list[int]],
    count: int,
    device: GpuDevice | None = None,
    operations: Operations | None = None,
) -> tuple[list[list[int]], list[type]]:
    """Returns the tokens, and the kinds of the model's modules, those of merged products among them."""

    async def serve() -> tuple[list[list[int]], list[type]]:
        async with running_on_device(exact(path), device, operations) as (engine, executor):
            answers = await asyncio.gather(*(ask(engine, body("m", p, max_tokens=count)) for p in prompts))
            return [answer.tokens[0] for answer in answers], kinds_of(executor._models["m"].module)

    return asyncio.run(serve())


def kinds_of(model: Any) -> list[type]:
    return [
        type(module.product if isinstance(module, MergedLinearPart) else module) for module in model.modules()
    ]


def prompts_of(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCAB, length).tolist() for length in lengths]


@pytest.mark.parametrize(
    ("form", "architecture", "gated"),
    [
        ("packed 4", "qwen3", 2),  # of whose three layers one has a plain matrix
        ("packed 4 zeros", "qwen2", 2),  # whose q, k and v have biases
        ("integers", "llama", 2),
        ("gptq 4 zeros", "mistral", 2),
        ("gptq 8", "gemma2", 3),
        ("awq row", "phi3", 0),  # gate and up are one layer there
        ("awq", "mixtral", 8),  # experts
    ],
)
def test_tokens_are_those_of_the_plain_checkpoint_of_these_numbers(
    tmp_path: Path, form: str, architecture: str, gated: int
) -> None:
    (tmp_path / "model").mkdir()
    path = make_checkpoint(tmp_path / "model", architecture)
    quantise(path, FORMATS[form])
    prompts = prompts_of(*LENGTHS)
    found, kinds = greedy(path, prompts, 12)
    assert QuantizedLinear not in kinds
    assert DeviceQuantizedLinear in kinds
    assert kinds.count(DeviceGatedMLP) == gated
    oracle = Oracle(twin(path))
    for prompt, tokens in zip(prompts, found, strict=True):
        assert len(tokens) == 12
        oracle.check(prompt, tokens)


@pytest.mark.parametrize("kinds", [(Type.Q4_0,), (Type.Q8_0, Type.Q4_1), (Type.Q5_1, Type.F16)])
def test_a_gguf_file(kinds: tuple[Type, ...], tmp_path: Path) -> None:
    """Its embedding, which stays in the file on CPUs, becomes plain."""
    file, source = make_gguf(tmp_path, "qwen3", *kinds)
    prompts = prompts_of(*LENGTHS)
    found, modules = greedy(file, prompts, 8)
    assert DeviceQuantizedLinear in modules
    assert nn.Embedding in modules
    oracle = Oracle(source)
    for prompt, tokens in zip(prompts, found, strict=True):
        oracle.check(prompt, tokens)


@pytest.mark.skipif(not interpreter.INSTALLED, reason="triton is not installed: pip install '.[gpu]'")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu does this on the device")
def test_the_kernel_gives_these_tokens(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    path = make_checkpoint(tmp_path / "model", "qwen2", num_hidden_layers=2)
    quantise(path, FORMATS["awq"])
    prompts = prompts_of(3, 20)
    interpreter.load()
    with interpreter.interpreting():
        found, _ = greedy(path, prompts, 3, one_lane(), triton_operations())
    oracle = Oracle(twin(path))
    for prompt, tokens in zip(prompts, found, strict=True):
        oracle.check(prompt, tokens)


def test_weights_of_unlike_forms_are_not_merged() -> None:
    torch.manual_seed(0)
    bias = nn.Parameter(torch.randn(8))
    some = QuantizedLinear(quantized(torch.randn(8, 64), 4, 32), bias)
    other = QuantizedLinear(quantized(torch.randn(24, 64), 4, 32), None)
    finer = QuantizedLinear(quantized(torch.randn(8, 64), 4, 16), None)
    eight = QuantizedLinear(quantized(torch.randn(8, 64), 8, 32), None)
    for unlike in (finer, eight):
        assert DeviceQuantizedLinear.of(plain_operations(), [some, unlike]) is None
    merged = DeviceQuantizedLinear.of(plain_operations(), [some, other])
    assert merged is not None
    x = torch.randn(1, 5, 64)
    torch.testing.assert_close(merged(x), torch.cat((some(x), other(x)), -1))


class _Small(GpuDevice):
    def free(self) -> tuple[int, int]:
        return 100_000, 4_000_000


def test_codes_count_among_the_weights_that_must_fit(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    path = make_checkpoint(tmp_path / "model", "qwen2")
    quantise(path, FORMATS["packed 4"])
    host = host_device(COMPUTE)
    small = _Small(host.torch, host.compute, host.partitions)
    with pytest.raises(ConfigError) as caught:
        load_executor(exact(path), small, plain_operations())
    needed = int(caught.value.message.split(" bytes")[0].split()[-1].replace(",", ""))
    target = DeviceTarget(host, plain_operations())
    module: Any = load_model(exact(path).models[0], BLOCK, target).module
    held = [*module.parameters(), *module.buffers()]
    products = {one.product for one in module.modules() if isinstance(one, MergedLinearPart)}
    held += [part for one in products for part in (*one.parameters(), *one.buffers())]
    assert needed == sum({one.data_ptr(): one.nbytes for one in held}.values())
