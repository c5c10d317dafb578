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

from kvloom.exec.attention import Scoring, attend_dense
from kvloom.exec.cuda.device import GpuDevice, host_device
from kvloom.exec.cuda.layers import DeviceGatedMLP, DeviceQuantizedLinear
from kvloom.exec.cuda.loader import DeviceTarget, load_executor
from kvloom.exec.cuda.operations import Operations, plain_operations, triton_operations
from kvloom.exec.fuse import MergedLinearPart
from kvloom.exec.loader import load_model
from kvloom.exec.quantized import QuantizedLinear, QuantizedWeight, quantized
from kvloom.types.errors import ConfigError
from kvloom.types.geometry import KVDtype
from kvloom.types.spec import EngineSpec, ModelSpec
from tests import interpreter
from tests.checkpoints import VOCAB, make_checkpoint
from tests.engines import ask, body, spec_of
from tests.exec.cuda.devices import COMPUTE, one_lane
from tests.exec.cuda.engines import running_on_device
from tests.exec.kept import KeptOracle
from tests.exec.loading import BLOCK, refusal
from tests.exec.packing import FORMATS, quantise, twin
from tests.ggufs import make_gguf
from tests.oracle import Oracle

LENGTHS = (1, 9, 70)


def exact(path: Path, kv_dtype: KVDtype = "auto") -> EngineSpec:
    model = ModelSpec(name="m", path=str(path), dtype="float32", kv_dtype=kv_dtype)
    return msgspec.structs.replace(spec_of({}, max_running=4), models=(model,))


def greedy(
    path: Path,
    prompts: Sequence[list[int]],
    count: int,
    device: GpuDevice | None = None,
    operations: Operations | None = None,
    kv_dtype: KVDtype = "auto",
) -> tuple[list[list[int]], list[type]]:
    """Returns the tokens, and the kinds of the model's modules, those of merged products among them."""

    async def serve() -> tuple[list[list[int]], list[type]]:
        async with running_on_device(exact(path, kv_dtype), device, operations) as (engine, executor):
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
        ("floats", "qwen2", 2),
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
@pytest.mark.parametrize("form", ["awq", "floats"])
def test_the_kernel_gives_these_tokens(form: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    path = make_checkpoint(tmp_path / "model", "qwen2", num_hidden_layers=1)
    quantise(path, FORMATS[form])
    prompts = prompts_of(3, 20)
    interpreter.load()
    with interpreter.interpreting():
        found, _ = greedy(path, prompts, 2, one_lane(), triton_operations())
    oracle = Oracle(twin(path))
    for prompt, tokens in zip(prompts, found, strict=True):
        oracle.check(prompt, tokens)


@pytest.mark.skipif(not interpreter.INSTALLED, reason="triton is not installed: pip install '.[gpu]'")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu does this on the device")
def test_the_kernels_keep_k_and_v_in_fp8(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    prompts = prompts_of(3, 20)
    kept: KVDtype = "float8_e4m3fn"
    interpreter.load()
    with interpreter.interpreting():
        found, _ = greedy(path, prompts, 3, one_lane(), triton_operations(), kv_dtype=kept)
    oracle = KeptOracle(path, kept)
    for prompt, tokens in zip(prompts, found, strict=True):
        oracle.check(prompt, tokens, 2e-2)


def test_inputs_are_rounded_to_fp8_unless_a_format_is_asked_for(tmp_path: Path) -> None:
    """The tokens that are served with `auto` are nearly the best of a plain model whose products round."""
    (tmp_path / "model").mkdir()
    path = make_checkpoint(tmp_path / "model", "qwen2")
    matrices = quantise(path, FORMATS["floats"])
    prompts = prompts_of(*LENGTHS)
    oracle = Oracle(twin(path))
    ids = torch.tensor([prompts[-1]])
    with torch.inference_mode():
        exact = oracle.model(ids).logits
        for name in matrices:
            oracle.model.set_submodule(name, Rounded(oracle.model.get_submodule(name)))
        wanted = oracle.model(ids).logits
    apart = float((exact - wanted).abs().max() / exact.abs().max())
    assert 1e-4 < apart < 0.2

    async def serve() -> list[list[int]]:
        spec = spec_of({"m": path}, max_running=4)
        async with running_on_device(spec) as (engine, executor):
            module: Any = executor._models["m"].module
            with torch.inference_mode():
                found = module(input_ids=ids, use_cache=False, kv=_Dense()).logits
            assert float((found - wanted).abs().max() / exact.abs().max()) < apart / 4
            answers = await asyncio.gather(*(ask(engine, body("m", p, max_tokens=8)) for p in prompts))
            return [answer.tokens[0] for answer in answers]

    for prompt, tokens in zip(prompts, asyncio.run(serve()), strict=True):
        with torch.inference_mode():
            logits = oracle.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        gaps = logits.max(-1).values - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        assert float(gaps.max()) < apart / 4 * float(exact.abs().max())


class Rounded(nn.Module):
    """A linear layer that rounds its inputs to FP8, in float64."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 448
        rounded = (x / scale).to(torch.float8_e4m3fn).double() * scale.double()
        bias = None if self.linear.bias is None else self.linear.bias.double()
        return nn.functional.linear(rounded, self.linear.weight.double(), bias).float()


class _Dense:
    """Stands in for the forward state of one prompt."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> Any:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return attend_dense(q, k, v, 0, scoring).transpose(0, 1)


def test_a_weight_that_torchs_product_does_not_take_keeps_its_inputs() -> None:
    codes = torch.randn(24, 64).to(torch.float8_e4m3fn)
    linear = QuantizedLinear(QuantizedWeight(8, codes, torch.rand(24, 1)), None)
    x = torch.randn(3, 64)
    for rows, rounds in ((24, False), (16, True)):
        part = QuantizedLinear(linear.quantized.rows(slice(rows)), None)
        product = DeviceQuantizedLinear.of(plain_operations(), [part])
        assert product is not None
        torch.testing.assert_close(product(x), part(x))
        product.round_inputs()
        assert torch.allclose(product(x), part(x), rtol=1e-5, atol=1e-5) != rounds


def test_cpus_refuse_floats(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    path = make_checkpoint(tmp_path / "model", "qwen2")
    quantise(path, FORMATS["floats"])
    assert "floats of 8 bits (FP8), which CPUs do not multiply; a GPU, or" in refusal(path)


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
    size = sum({one.data_ptr(): one.nbytes for one in held}.values())
    assert size <= needed <= 1.05 * size  # it is counted before the checkpoint is read
