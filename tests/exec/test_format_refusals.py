"""Quantised checkpoints that are not served, or contradict themselves, are refused in one line that says
where, and what would be right."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvloom.exec.checkpoint import CONFIG, WHOLE, open_checkpoint
from kvloom.exec.formats.weights import quantized_weights
from kvloom.types.errors import ConfigError
from tests.checkpoints import make_checkpoint
from tests.exec.loading import load, reconfigure, refusal
from tests.exec.packing import FORMATS, quantise

UP = "model.layers.0.mlp.up_proj"
Tensors = dict[str, Tensor]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return make_checkpoint(tmp_path / "model", "qwen2")


def change(path: Path, tensors: Callable[[Tensors], object]) -> None:
    found = load_file(path / WHOLE)
    tensors(found)
    save_file({name: one.contiguous() for name, one in found.items()}, path / WHOLE)


def configure(path: Path, changes: Mapping[str, Any]) -> None:
    config = json.loads((path / CONFIG).read_text())
    reconfigure(path, quantization_config=config["quantization_config"] | changes)


def weights(**changes: Any) -> dict[str, Any]:
    """What changes the scheme of all layers."""
    whole = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": whole | changes}}}


@pytest.mark.parametrize(
    ("form", "changes", "line"),
    [
        (
            "packed 4",
            {"quant_method": "fp8"},
            "quant_method: 'fp8'; compressed-tensors or gptq or awq is right",
        ),
        ("packed 4", {"quant_method": "bitsandbytes"}, "compressed-tensors or gptq or awq is right"),
        ("packed 4", {"quant_method": None}, "quant_method: None"),
        ("packed 4", {"quant_method": ["gptq"]}, "quant_method: ['gptq']"),
        ("packed 4", {"format": "float-quantized"}, "weights.type: 'int'; float is right"),
        ("floats", weights(num_bits=4, type="float"), "num_bits: 4; 8 is right"),
        (
            "floats",
            weights(num_bits=8, type="float", strategy="block"),
            "'block'; tensor or channel is right",
        ),
        ("packed 4", {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'; pack-quantized or"),
        ("packed 4", {"format": "mixed-precision"}, "config_groups.group_0.format: 'mixed-precision'"),
        ("packed 4", {"config_groups": ["W4A16"]}, "config_groups: ['W4A16']; an object is right"),
        ("packed 4", {"config_groups": {"W4A16": ["Linear"]}}, "an object with weights is right"),
        ("packed 4", weights(type="float"), "weights.type: 'float'; int is right"),
        ("packed 4", weights(num_bits=3), "num_bits: 3; 4 or 8 is right"),
        ("packed 4", weights(num_bits="4"), "num_bits: '4'; a whole number is right"),
        ("packed 4", weights(strategy="block"), "strategy: 'block'; tensor or channel or group is right"),
        ("packed 4", weights(group_size=-1), "group_size: -1; a positive number is right"),
        ("packed 4", weights(group_size=24), "groups of 24; 16, 32, 64, 128 that divide them"),
        ("packed 4", weights(group_size=64), "groups of 64"),
        ("packed 4", weights(group_size=16), "weight_scale has shape [64, 3]; [64, 6] is right"),
        ("packed 4", weights(num_bits=8), "weight_packed has shape [64, 12]; [64, 24] is right"),
        ("packed 4", weights(symmetric=False), "has weight_packed and lacks weight_zero_point"),
        ("packed 4", weights(actorder="group"), "has weight_packed and lacks weight_g_idx"),
        (
            "packed 4",
            {"format": "int-quantized"},
            "weight_packed is stored as its quantization_config says of",
        ),
        ("integers", {"format": "pack-quantized"}, "weight is stored as its quantization_config says of no"),
        ("packed 4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "a dense model is right"),
        ("packed 4", {"sparsity_config": "dense"}, "a dense model is right"),
        (
            "packed 4",
            {"transform_config": {"config_groups": {"R1": {}}}},
            "a model without transforms is right",
        ),
        ("gptq 4", {"bits": 3}, "bits: 3; 4 or 8 is right"),
        ("gptq 4", {"bits": None}, "bits: None; a whole number is right"),
        ("gptq 4", {"bits": 8}, "groups of 32"),
        ("gptq 4", {"group_size": 0}, "group_size: 0; -1 or a positive number is right"),
        ("gptq 4", {"group_size": 16}, "scales has shape [3, 64]; [6, 64] is right"),
        ("gptq 4", {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'; gptq or gptq_v2 is right"),
        ("gptq 4", {"is_marlin_format": True}, "checkpoint_format: 'marlin'"),
        ("gptq 4", {"checkpoint_format": {}, "format": ["x"]}, "checkpoint_format: ['x']"),
        ("awq", {"bits": 8}, "bits: 8; 4 is right"),
        ("awq", {"version": "gemv"}, "version: 'gemv'; gemm is right"),
        ("awq", {"version": "gemv_fast"}, "version: 'gemv_fast'; gemm is right"),
        ("awq", {"quant_method": "gptq"}, "scales has shape [3, 64]; [24, 8] is right"),
    ],
    ids=str,
)
def test_a_config(path: Path, form: str, changes: Mapping[str, Any], line: str) -> None:
    quantise(path, FORMATS[form])
    configure(path, changes)
    assert line in refusal(path)


def lacks(part: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"{UP}.{part}")


def puts(part: str, of: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    name = f"{UP}.{part}"
    return lambda tensors: tensors.__setitem__(name, of(tensors.get(name, torch.zeros(0))))


def infinite(scales: Tensor) -> Tensor:
    return scales.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(float("inf")).to(scales.dtype))


ORDER = torch.arange(64) % 2


@pytest.mark.parametrize(
    ("form", "changed", "line"),
    [
        ("packed 4", lacks("weight_scale"), f"{UP} has weight_packed and lacks weight_scale"),
        ("packed 4", lacks("weight_shape"), f"{UP} has weight_packed and lacks weight_shape"),
        ("packed 4", lacks("weight_packed"), f"{UP} has weight_scale and lacks weight"),
        (
            "packed 4",
            puts("weight_scale", infinite),
            f"{UP}.weight_packed cannot be: a scale or an offset is",
        ),
        ("packed 4", puts("weight_scale", lambda one: one.to(torch.float8_e4m3fn)), "format F8_E4M3; F16 or"),
        (
            "packed 4",
            puts("weight_scale", lambda one: one[:, :1]),
            "weight_scale has shape [96, 1]; [96, 2] is",
        ),
        ("packed 4", puts("weight_packed", lambda one: one[:, 1:]), "has shape [96, 7]; [96, 8] is right"),
        (
            "packed 4",
            puts("weight_packed", lambda one: one.to(torch.uint8)),
            "has the number format U8; I32 is",
        ),
        (
            "packed 4",
            puts("weight_packed", lambda one: one[0]),
            "weight_packed has shape [8]; two dimensions",
        ),
        ("packed 4", puts("weight_shape", lambda one: one[:1]), "weight_shape has shape [1]; [2] is right"),
        ("packed 4", puts("weight_shape", lambda one: -one), "weight_shape says -96 × -64; positive numbers"),
        (
            "packed 4",
            puts("weight_shape", lambda one: one - 1),
            "weight_packed has shape [96, 8]; [95, 8] is",
        ),
        (
            "packed 4",
            puts("weight_shape", lambda _: torch.tensor([96, 63])),
            "rows of 63 numbers; an even number",
        ),
        ("packed 4", puts("weight_g_idx", lambda _: ORDER), "groups by activation (act_order); a checkpoint"),
        (
            "packed 4 zeros",
            puts("weight_zero_point", lambda one: one[:-1]),
            "zero_point has shape [11, 2]; [12, 2]",
        ),
        ("packed 4 zeros", puts("weight_zero_point", lambda one: one.float()), "F32; I8 is right"),
        ("integers", lacks("weight_scale"), f"{UP} has weight and lacks weight_scale"),
        ("integers", puts("weight", lambda one: one.to(torch.float8_e4m3fn)), "format F8_E4M3; I8 is right"),
        ("floats", puts("weight", lambda one: one.to(torch.int8)), "format I8; F8_E4M3 is right"),
        ("integers", puts("weight", lambda one: one[:, :0]), "weight has shape [96, 0]; two dimensions, and"),
        (
            "integers",
            puts("weight_scale", infinite),
            f"{UP}.weight cannot be: a scale or an offset is infinite",
        ),
        (
            "integers",
            puts("weight", lambda one: one[:, 2:]),
            f"{UP} has shape [96, 62] in its files and [96, 64]",
        ),
        ("gptq 4", lacks("qweight"), f"{UP} has g_idx and lacks qweight"),
        ("gptq 4", lacks("qzeros"), f"{UP} has g_idx and lacks qzeros"),
        ("gptq 4", lacks("scales"), f"{UP} has g_idx and lacks scales"),
        ("gptq 4", puts("g_idx", lambda _: ORDER), f"{UP}.g_idx puts columns into groups by activation"),
        ("gptq 4", puts("g_idx", lambda one: one[1:]), "g_idx has shape [63]; [64] is right"),
        ("gptq 4", puts("qzeros", lambda one: one[:, 1:]), "qzeros has shape [2, 11]; [2, 12] is right"),
        ("gptq 4", puts("scales", infinite), f"{UP}.qweight cannot be: a scale or an offset is infinite"),
        (
            "gptq 4",
            puts("qweight", lambda one: one.float()),
            "qweight has the number format F32; I32 is right",
        ),
        ("awq", puts("qzeros", lambda one: one[1:]), "qzeros has shape [1, 12]; [2, 12] is right"),
        ("awq", lacks("qzeros"), f"{UP} has qweight and lacks qzeros"),
        # activations that AutoAWQ scales, as those of GPT-NeoX
        (
            "awq",
            lambda tensors: tensors.update({"a.act.scales": torch.ones(4)}),
            "a.act has scales and lacks",
        ),
    ],
)
def test_tensors(path: Path, form: str, changed: Callable[[Tensors], object], line: str) -> None:
    quantise(path, FORMATS[form])
    change(path, changed)
    message = refusal(path)
    assert line in message
    assert WHOLE in message or " in its config" in message


JSON: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 0, -1, 8, 1 << 40, 0.5, "gptq", [], [1], {}, {"weights": {}}]
)
DTYPES = [
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), form=st.sampled_from(sorted(FORMATS)))
def test_whatever_stands_there_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, form: str
) -> None:
    """No other error is raised, and nothing has another shape than its layout said."""
    path, made = tmp_path_factory.mktemp("drawn"), FORMATS[form]
    parts = made.parts(made.draw(32, 32, np.random.default_rng(0)))
    for name in data.draw(st.lists(st.sampled_from(sorted(parts)), max_size=2)):
        shape = data.draw(st.lists(st.integers(0, 33), max_size=3))
        parts[name] = torch.ones(shape, dtype=data.draw(st.sampled_from(DTYPES)))
    if data.draw(st.booleans()):
        parts.pop(data.draw(st.sampled_from(sorted(parts))))
    config = json.loads(json.dumps(made.config))
    objects = [config, config.get("config_groups"), weights_of(config)]
    inside = data.draw(st.sampled_from([one for one in objects if one]))
    for key in data.draw(st.lists(st.sampled_from(sorted(inside)), max_size=2)):
        inside[key] = data.draw(JSON)
    save_file({f"a.{name}": one for name, one in parts.items()}, path / WHOLE)
    (path / CONFIG).write_text("{}")
    try:
        found = quantized_weights(replace(open_checkpoint(str(path)), quantization=config))
        assert found is not None
        assert all(found[name].shape == layout.shape for name, layout in found.layouts.items())
        message = ""
    except ConfigError as error:
        message = error.message
    assert "\n" not in message
    assert len(message) < 400


def weights_of(config: dict[str, Any]) -> dict[str, Any] | None:
    groups = config.get("config_groups")
    return groups["group_0"]["weights"] if groups else None


def test_group_order_is_served_if_it_is_none(path: Path) -> None:
    quantise(path, FORMATS["gptq 4"])
    configure(path, {"desc_act": True})
    assert load(path).geometry.layers == 3
    change(path, lacks("g_idx"))
    assert f"{UP} has qweight and lacks g_idx" in refusal(path)


def test_a_bias_for_which_there_is_no_place(path: Path) -> None:
    """Some tools add biases of zeros to layers that have none."""
    quantise(path, FORMATS["gptq 4"])
    change(path, puts("bias", lambda _: torch.zeros(96)))
    assert load(path).geometry.layers == 3
    change(path, puts("bias", lambda bias: bias + 1))
    assert f"{UP}.bias is a bias, and the layer has none in its config" in refusal(path)


def test_what_is_left_out_of_activations_and_the_cache(path: Path) -> None:
    """They are not rounded."""
    quantise(path, FORMATS["integers"])
    change(path, puts("input_scale", lambda _: torch.ones(1)))
    configure(path, {"kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    assert load(path).geometry.layers == 3


def mixture(tmp_path: Path) -> Path:
    (tmp_path / "mixture").mkdir()
    path = make_checkpoint(tmp_path / "mixture", "qwen3_moe")
    quantise(path, FORMATS["integers"])
    return path


EXPERT = "model.layers.0.mlp.experts.1.gate_proj"


def test_experts_that_are_quantised_in_part(tmp_path: Path) -> None:
    path = mixture(tmp_path)
    change(path, lambda tensors: [tensors.pop(f"{EXPERT}.{part}") for part in ("weight", "weight_scale")])
    said = refusal(path)
    assert "model.layers.0.mlp.experts.1.gate_proj.weight is not quantised, or missing, and others" in said


def test_experts_that_the_config_does_not_have(tmp_path: Path) -> None:
    path = mixture(tmp_path)
    reconfigure(path, num_experts=3, num_local_experts=3)
    assert "experts.3.down_proj is quantised, and is no linear layer of" in refusal(path)


def test_experts_of_another_shape(tmp_path: Path) -> None:
    path = mixture(tmp_path)
    reconfigure(path, moe_intermediate_size=32)
    assert "experts.0.down_proj has shape [64, 48] in its files and [64, 32] in its config" in refusal(path)


def test_a_quantised_embedding(path: Path) -> None:
    quantise(path, FORMATS["integers"])
    scale = {"model.embed_tokens.weight_scale": torch.ones(320, 1)}
    change(
        path,
        lambda tensors: tensors.update(
            scale | {"model.embed_tokens.weight": torch.zeros(320, 64, dtype=torch.int8)}
        ),
    )
    assert "model.embed_tokens is quantised, and is no linear layer" in refusal(path)


def test_a_plain_tensor_that_is_missing(path: Path) -> None:
    quantise(path, FORMATS["packed 4"])
    change(path, lambda tensors: tensors.pop("model.layers.1.mlp.down_proj.weight"))
    assert "its files lack model.layers.1.mlp.down_proj.weight" in refusal(path)


def test_files_that_hold_too_little_for_the_config(path: Path) -> None:
    quantise(path, FORMATS["packed 4"])
    reconfigure(path, vocab_size=1 << 23)
    assert "parameters that are not quantised, and its files hold" in refusal(path)


@pytest.mark.parametrize("said", ["int4", 4, ["gptq"]])
def test_a_quantization_config_that_is_no_object(path: Path, said: object) -> None:
    reconfigure(path, quantization_config=said)
    assert "quantization_config is no object" in refusal(path)
