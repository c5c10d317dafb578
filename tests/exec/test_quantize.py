"""`kvloom quantize` writes what the compressed-tensors format says, and other numbers for nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvloom.cli.app import run
from kvloom.exec.checkpoint import open_checkpoint
from kvloom.exec.quantize import packed, quantize_checkpoint, rounded
from kvloom.exec.quantized import Bits
from kvloom.types.errors import ConfigError
from tests.checkpoints import make_checkpoint
from tests.exec.loading import load

LAYER = "model.layers.1.mlp.up_proj"


def silent(_: str) -> None:
    pass


def unpacked(words: Tensor, bits: int, columns: int) -> Tensor:
    """Each code bit by bit from the lowest bit of a row's words up, less half of its range."""
    held = np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little")
    codes = held.reshape(len(held), -1, bits) @ (1 << np.arange(bits))
    return torch.from_numpy(codes[:, :columns].astype(np.int64) - (1 << bits - 1))


def grouped(numbers: Tensor, group: int) -> Tensor:
    return numbers.view(len(numbers), -1, group)


@given(bits=st.sampled_from((4, 8)), group=st.sampled_from((16, 32)), seed=st.integers(0, 99))
def test_codes_are_near_and_come_back(bits: Bits, group: int, seed: int) -> None:
    weight = torch.from_numpy(np.random.default_rng(seed).normal(size=(3, 96))).to(torch.bfloat16)
    codes, scales = rounded(weight, bits, group)
    assert scales.dtype == torch.bfloat16
    assert unpacked(packed(codes, bits), bits, 96).equal(codes.long())
    found = grouped(codes, group) * scales.float()[..., None]
    error = (found.flatten(1) - weight.float()).norm() / weight.float().norm()
    assert error < (0.007 if bits == 8 else 0.12)


def test_of_several_scales_the_best_is_taken() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    codes, scales = rounded(weight, 4, 32)
    groups = grouped(weight, 32)
    plain = groups.abs().amax(-1, keepdim=True) / 7
    before = ((groups / plain).round() * plain - groups).square().sum()
    after = (grouped(codes, 32) * scales[..., None] - groups).square().sum()
    assert after < 0.9 * before
    assert codes.min() == -8


@pytest.mark.parametrize("bits", [4, 8])
def test_a_checkpoint_becomes_one_of_few_bits(bits: Bits, tmp_path: Path) -> None:
    source, out = make_checkpoint(tmp_path / "whole", "qwen2"), tmp_path / "small"
    lines: list[str] = []
    quantize_checkpoint(str(source), None, out, bits, lines.append)
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert lines[-1].startswith("21 of 21 layers: ")
    weight = before.pop(f"{LAYER}.weight")
    assert after[f"{LAYER}.weight_shape"].tolist() == [96, 64]
    codes = grouped(unpacked(after[f"{LAYER}.weight_packed"], bits, 64), 32)
    found = (codes * after[f"{LAYER}.weight_scale"][..., None]).flatten(1)
    assert (found - weight).norm() < (0.007 if bits == 8 else 0.12) * weight.norm()
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.bias"):
        assert after[name].equal(before[name])
    open_checkpoint(str(out))  # which checks its files
    description = json.loads((out / "config.json").read_text())["quantization_config"]
    assert description["ignore"] == ["lm_head"]
    assert description["config_groups"]["group_0"]["weights"]["num_bits"] == bits
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_formats_own_package_reads_it(bits: Bits, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import PackedQuantizationCompressor  # noqa: PLC0415
    from compressed_tensors.quantization import QuantizationConfig  # noqa: PLC0415

    source, out = make_checkpoint(tmp_path / "whole", "llama", hidden_size=96), tmp_path / "small"
    quantize_checkpoint(str(source), None, out, bits, silent)
    after = load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    parts = ("weight_packed", "weight_scale", "weight_shape")
    state: dict[str, Any] = {part: after[f"{LAYER}.{part}"] for part in parts}
    codes = grouped(unpacked(state["weight_packed"], bits, 96), 32)
    expected = (codes * state["weight_scale"][..., None]).flatten(1)
    found = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    assert found.equal(expected)


def test_files_stay_apart_and_have_an_index(tmp_path: Path) -> None:
    source, out = make_checkpoint(tmp_path / "whole", "qwen2"), tmp_path / "small"
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    files = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, some in files.items():
        save_file({name: tensors[name] for name in some}, source / file, metadata={"format": "pt"})
    places = {name: file for file, some in files.items() for name in some}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (source / "model.safetensors").unlink()
    quantize_checkpoint(str(source), None, out, 4, silent)
    made = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    for file in files:
        assert sorted(load_file(out / file)) == sorted(name for name, place in made.items() if place == file)
    assert {f"{LAYER}.weight_packed", "lm_head.weight"} <= set(made)


@pytest.mark.parametrize(
    ("architecture", "router"), [("mixtral", "block_sparse_moe.gate"), ("qwen3_moe", "mlp.gate")]
)
def test_a_mixture_of_few_bits(architecture: str, router: str, tmp_path: Path) -> None:
    """Its experts are quantised under their names in the files, and its routers are not."""
    source, out = make_checkpoint(tmp_path / "whole", architecture), tmp_path / "small"
    quantize_checkpoint(str(source), None, out, 8, silent)
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    experts = [name for name in before if ".experts." in name]
    assert len(experts) == 3 * 4 * 3
    assert all(f"{name}_packed" in after and name not in after for name in experts)
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert sorted(ignored) == ["lm_head", *(f"model.layers.{layer}.{router}" for layer in range(3))]
    loaded: Any = load(out, dtype="float32")
    assert loaded.card.parameters == load(source).card.parameters
    gate, down, up = (
        ("w1", "w2", "w3") if architecture == "mixtral" else ("gate_proj", "down_proj", "up_proj")
    )
    for layer, block in enumerate(loaded.module.model.layers):
        for i, expert in enumerate(block.mlp.experts):
            stem = f"model.layers.{layer}.{router.removesuffix('gate')}experts.{i}"
            for name, linear in ((gate, expert.gate), (down, expert.down), (up, expert.up)):
                weight = before[f"{stem}.{name}.weight"]
                assert (linear.dequantized() - weight).norm() < 0.007 * weight.norm()


def spoil(source: Path, name: str, value: float) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors[name][0, 0] = value
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


def test_what_cannot_be_quantised_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source, out = make_checkpoint(tmp_path / "whole", "qwen2"), tmp_path / "small"
    spoil(source, f"{LAYER}.weight", float("inf"))
    with pytest.raises(ConfigError, match=f"{LAYER}.weight in model.safetensors has a number"):
        quantize_checkpoint(str(source), None, out, 4, silent)
    mixture = make_checkpoint(tmp_path / "mixture", "mixtral")
    spoil(mixture, "model.layers.1.block_sparse_moe.experts.3.w2.weight", float("nan"))
    with pytest.raises(ConfigError, match=r"experts.3.w2.weight in model.safetensors has a number"):
        quantize_checkpoint(str(mixture), None, out, 4, silent)
    tensors = load_file(mixture / "model.safetensors")
    plain = {name: one for name, one in tensors.items() if ".experts." not in name}
    stacked = {f"model.layers.{i}.mlp.experts.gate_up_proj": torch.zeros(4, 192, 64) for i in range(3)}
    save_file(plain | stacked, mixture / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="gate_up_proj holds several experts; files with tensors of each"):
        quantize_checkpoint(str(mixture), None, out, 4, silent)
    other = make_checkpoint(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ConfigError, match="its layers have no linear modules"):
        quantize_checkpoint(str(other), None, out, 4, silent)
    assert {file.name for file in tmp_path.iterdir()} == {"whole", "mixture", "gpt2"}


def test_the_command_makes_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = make_checkpoint(tmp_path / "whole", "qwen2"), tmp_path / "small"
    command = ["quantize", str(source), "--to", "int4", "-o", str(out)]
    assert run(command) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"done: {out}"
    assert run(command) == 2
    error = capsys.readouterr().err
    assert f"{out} is there already; a new folder is right" in error
    assert error.count("\n") == 1
    assert run(["quantize", str(out), "--to", "int8", "-o", str(tmp_path / "again")]) == 2
    assert "it is quantised already" in capsys.readouterr().err
