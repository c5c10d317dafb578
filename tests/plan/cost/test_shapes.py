"""Shapes and device sheets: known ones, those of real checkpoints, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace

from kvloom.plan.cost.devices import DEVICES, find_device
from kvloom.plan.cost.shapes import find_shape, read_shape, shape_from_config
from kvloom.types.errors import ConfigError
from tests.checkpoints import _SMALL, ARCHITECTURES

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


UNLIKE = {
    "llama4": "only some of its layers are mixtures",
    "gemma3n": "intermediate_size",
    "deepseek_v2": "latent attention",
    "deepseek_v3": "latent attention",
}
"""Architectures whose layers have no one shape, and why."""


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - UNLIKE.keys()))
def test_a_shape_counts_what_transformers_builds(architecture: str, tmp_path: Path) -> None:
    kind, special = ARCHITECTURES[architecture]
    wide = {"hidden_size": 192} | ({"n_embd": 192} if architecture == "gpt2" else {})
    config = getattr(transformers, kind)(**(_SMALL | special | wide))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    shape = read_shape(tmp_path, itemsize=4)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert shape.parameters == pytest.approx(built, rel=0.08)  # norms, biases, positions and routers beside
    assert shape.layers == config.num_hidden_layers
    assert shape.weight_bytes == 4 * shape.parameters


@pytest.mark.parametrize("architecture", sorted(UNLIKE))
def test_unlike_layers_have_no_shape(architecture: str, tmp_path: Path) -> None:
    kind, special = ARCHITECTURES[architecture]
    getattr(transformers, kind)(**(_SMALL | special)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=UNLIKE[architecture]):
        read_shape(tmp_path)


def test_known_shapes_are_as_published() -> None:
    assert shape_from_config(LLAMA) == find_shape("Llama3-8B")
    kv = {"llama-7b": 524_288, "llama-13b": 819_200, "llama-30b": 1_597_440, "llama-65b": 2_621_440}
    for name, size in kv.items():
        assert find_shape(name).kv_bytes == size
        assert find_shape(name).parameters == pytest.approx(float(name[6:-1]) * 1e9, rel=0.09)
    assert find_shape("llama2-70b").parameters == pytest.approx(70e9, rel=0.03)
    assert find_shape("opt-13b").parameters == pytest.approx(13e9, rel=0.02)


def test_k_and_v_may_have_a_format_of_their_own() -> None:
    """The engine's own geometry says what they take."""
    shape = find_shape("llama3-8b")
    for kv_dtype, row in (("float32", 512), ("bfloat16", 256), ("int8", 132)):
        kept = replace(shape, kv_dtype=kv_dtype)
        assert kept.weight_bytes == shape.weight_bytes
        assert kept.kv_bytes == 2 * 32 * 8 * row
        geometry = kept.geometry(16384)
        assert (geometry.row_bytes, geometry.tokens_per_block) == (row, 16384 // (2 * row))
    assert shape.kv_bytes == replace(shape, kv_dtype="bfloat16").kv_bytes


def test_the_part_that_speaks() -> None:
    config = {"model_type": "gemma3", "text_config": LLAMA, "vision_config": {"hidden_size": 1152}}
    assert shape_from_config(config) == shape_from_config(LLAMA)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"num_hidden_layers": None}, ["num_hidden_layers", "n_layer", "missing"]),
        ({"intermediate_size": None}, ["intermediate_size", "missing"]),
        ({"vocab_size": "many"}, ["vocab_size", "'many'", "whole number"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "'0'", "from 1 on"]),
        ({"head_dim": True}, ["head_dim", "'True'"]),
        ({"torch_dtype": "int3"}, ["dtype", "int3", "bfloat16"]),
        ({"num_hidden_layers": 2**31}, ["no decoder", "layers"]),
        ({"is_encoder_decoder": True}, ["encoder-decoder"]),
        ({"kv_lora_rank": 512}, ["latent attention"]),
        ({"quantization_config": {"bits": 4}}, ["quantised"]),
        ({"num_experts": 8}, ["num_experts_per_tok", "missing"]),
        ({"decoder_sparse_step": 2}, ["some of its layers"]),
        ({"layer_types": ["full_attention", "mamba"]}, ["mamba", "without attention"]),
        ({"layer_types": ["linear_attention"]}, ["linear_attention"]),
    ],
)
def test_what_has_no_shape_is_one_line(change: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    with pytest.raises(ConfigError) as caught:
        read_shape(tmp_path)
    for part in ("config.json: ", *parts):
        assert part in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_file_that_is_no_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, "latin-1")
    with pytest.raises(ConfigError, match=r"config\.json: .*right$"):
        read_shape(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        read_shape(tmp_path / "nowhere")


def test_devices_are_found_in_any_case() -> None:
    assert find_device("a100-80").memory == 80 * 10**9
    assert {"A100-40", "A100-80", "A10", "L40S", "H100", "H200"} == set(DEVICES)
    with pytest.raises(ConfigError, match=r"'B300' is not known; A100-40, .*H200 are"):
        find_device("B300")
    with pytest.raises(ConfigError, match=r"'gpt-9'; known are llama-7b, .*checkpoint's folder"):
        find_shape("gpt-9")
