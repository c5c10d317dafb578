"""Checkpoints of compressed-tensors, GPTQ and AWQ stand for what their definitions say, and are served as the
plain checkpoint of these numbers is."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvloom.exec.checkpoint import INDEX, WHOLE, open_checkpoint
from kvloom.exec.cpu import number_format
from kvloom.exec.cpu.executor import CPU, CpuTarget
from kvloom.exec.cpu.linear import HalfLinear
from kvloom.exec.cpu.quantized import PackedQuantizedLinear
from kvloom.exec.formats.weights import QuantizedTensors, quantized_weights
from kvloom.exec.loader import load_model
from kvloom.exec.parallel.group import RankGroup
from kvloom.types.errors import ConfigError
from kvloom.types.spec import ModelSpec
from tests.checkpoints import VOCAB, make_checkpoint
from tests.engines import ask, body, running, spec_of
from tests.exec.loading import BLOCK, load, reconfigure
from tests.exec.packing import FORMATS, gptq, gptq_v2, quantise, twin
from tests.exec.ranks import Alone, both
from tests.oracle import Oracle


def stored(path: Path) -> QuantizedTensors:
    found = quantized_weights(open_checkpoint(str(path)))
    assert found is not None
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return make_checkpoint(tmp_path / "model", "qwen2")


@pytest.mark.parametrize("form", FORMATS)
def test_numbers_are_what_the_format_says(path: Path, form: str) -> None:
    matrices = quantise(path, FORMATS[form])
    found = stored(path)
    assert set(found) == set(matrices)
    for name, matrix in matrices.items():
        weight = found[name]
        assert weight.dequantized().equal(matrix.dense)
        assert weight.bits == FORMATS[form].bits
        assert weight.shape == found.layouts[name].shape == matrix.codes.shape
        assert weight.nbytes <= found.layouts[name].nbytes
    assert "model.layers.0.self_attn.q_proj.bias" in found.plain
    assert "model.layers.1.mlp.down_proj.weight" in found.plain


def test_codes_of_4_bits_stay_in_the_mapped_file(path: Path) -> None:
    quantise(path, FORMATS["packed 4"])
    found, name = stored(path), "model.layers.0.mlp.up_proj"
    assert found[name].codes.data_ptr() == found[name].codes.data_ptr()
    del found
    assert stored(path)[name].codes.any()  # which outlives what has mapped it


def test_a_zero_of_0_borrows_from_its_neighbour_in_the_first_version_of_gptq(path: Path) -> None:
    matrix = FORMATS["gptq 4 zeros"].draw(64, 64, np.random.default_rng(1))
    matrix.zeros[::3] = 0
    for form, parts in (("gptq 4 zeros", gptq(matrix)), ("gptq 4 row", gptq_v2(matrix))):
        config = dict(FORMATS[form].config) | {"group_size": 32}
        save_file({f"a.{name}": one for name, one in parts.items()}, path / WHOLE)
        weights = quantized_weights(replace(open_checkpoint(str(path)), quantization=config))
        assert weights is not None
        assert weights["a"].dequantized().equal(matrix.dense)


def test_one_scale_for_a_matrix(path: Path) -> None:
    matrices = quantise(path, FORMATS["integers"])
    name = "model.layers.0.mlp.up_proj"
    tensors = load_file(path / WHOLE)
    for scale in (torch.tensor(0.5), torch.tensor([0.5])):
        for module in matrices:
            tensors[f"{module}.weight_scale"] = scale.clone()
        save_file(tensors, path / WHOLE)
        config = dict(FORMATS["integers"].config)
        weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor"}
        config["config_groups"] = {"group_0": {"weights": weights}}
        found = quantized_weights(replace(open_checkpoint(str(path)), quantization=config))
        assert found is not None
        assert found[name].dequantized().equal(0.5 * (torch.from_numpy(matrices[name].codes) - 128).float())


@pytest.mark.parametrize(
    ("architecture", "dtype"), [("qwen3", torch.bfloat16), ("gemma2", torch.float32)], ids=["qwen3", "gemma2"]
)
def test_what_is_plain_keeps_its_16_bits_if_the_model_computes_in_float32(
    architecture: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma's embedding is none that is widened, so all of that model is float32."""
    monkeypatch.setattr(number_format, "_MEASURED", 1 << 12)
    monkeypatch.setattr(number_format, "measure", lambda own, depth: (1.0, 2.0))
    path = make_checkpoint(tmp_path, architecture, tie_word_embeddings=True)
    quantise(path, FORMATS["packed 4"])
    tensors = load_file(path / WHOLE)
    plain = {name: one.bfloat16() for name, one in tensors.items() if name.endswith(".weight")}
    save_file(tensors | plain, path / WHOLE, metadata={"format": "pt"})
    reconfigure(path, dtype="bfloat16")
    loaded = load(path)
    module: Any = loaded.module
    assert loaded.kv_dtype == torch.float32
    assert isinstance(module.lm_head, HalfLinear) == (dtype == torch.bfloat16)


@pytest.mark.parametrize(
    ("form", "architecture"),
    [
        ("packed 4", "qwen3"),
        ("packed 4 zeros", "qwen2"),
        ("integers", "llama"),
        ("gptq 4 zeros", "qwen2"),
        ("gptq 8", "mistral"),
        ("awq", "gemma2"),
        ("awq row", "phi3"),
        ("packed 8", "qwen3_moe"),
        ("packed 4", "mixtral"),
        ("gptq 4 zeros", "mixtral"),
        ("awq", "olmoe"),
    ],
)
def test_tokens_are_those_of_the_plain_checkpoint_of_these_numbers(
    tmp_path: Path, form: str, architecture: str
) -> None:
    (tmp_path / "model").mkdir()
    path = make_checkpoint(tmp_path / "model", architecture)
    quantise(path, FORMATS[form])
    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCAB, length).tolist() for length in (1, 9, 70)]

    exact = ModelSpec(name="m", path=str(path), dtype="float32")

    async def serve() -> list[list[int]]:
        async with running(msgspec.structs.replace(spec_of({}), models=(exact,))) as engine:
            answers = await asyncio.gather(*(ask(engine, body("m", p, max_tokens=12)) for p in prompts))
            return [answer.tokens[0] for answer in answers]

    oracle = Oracle(twin(path))
    for prompt, tokens in zip(prompts, asyncio.run(serve()), strict=True):
        assert len(tokens) == 12
        oracle.check(prompt, tokens)


def test_a_quantised_head_beside_a_plain_embedding(tmp_path: Path) -> None:
    """The embedding would else be tied to it."""
    (tmp_path / "model").mkdir()
    path = make_checkpoint(tmp_path / "model", "llama")
    made = FORMATS["gptq 4"]
    quantise(path, made)
    matrix = made.draw(VOCAB, 64, np.random.default_rng(2))
    tensors = load_file(path / WHOLE)
    tensors |= {f"lm_head.{part}": one for part, one in made.parts(matrix).items()}
    save_file(tensors, path / WHOLE)
    module = load(path, dtype="float32").module
    head = module.get_submodule("lm_head")
    assert isinstance(head, PackedQuantizedLinear)
    assert torch.allclose(head(torch.eye(64)).T, matrix.dense, rtol=1e-4)
    embedding = module.get_parameter("model.embed_tokens.weight")
    assert embedding.equal(tensors["model.embed_tokens.weight"])


def test_parts_of_a_layer_in_several_files_and_in_bfloat16(path: Path) -> None:
    matrices = quantise(path, FORMATS["packed 4 zeros"])
    tensors = sorted(load_file(path / WHOLE).items())
    (path / WHOLE).unlink()
    halves = {"a.safetensors": dict(tensors[::2]), "b.safetensors": dict(tensors[1::2])}
    for file, half in halves.items():
        save_file(half, path / file, metadata={"format": "pt"})
    places = {name: file for file, half in halves.items() for name in half}
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    found = stored(path)
    assert all(found[name].dequantized().equal(matrix.dense) for name, matrix in matrices.items())
    assert load(path, dtype="bfloat16").card.dtype == "bfloat16"


def test_weights_stand_in_memory_packed_and_the_card_counts_what_they_stand_for(path: Path) -> None:
    matrices = quantise(path, FORMATS["packed 4"])
    sizes: list[int] = []

    class Target(CpuTarget):
        def check_room(self, size: int) -> None:
            sizes.append(size)

    loaded = load_model(ModelSpec(name="mine", path=str(path)), BLOCK, Target())
    plain = load_file(path / WHOLE)
    dense = load_file(twin(path) / WHOLE)
    assert loaded.card.parameters == sum(one.numel() for one in dense.values())
    kept = sum(one.nbytes for name, one in plain.items() if "weight_" not in name)
    held = sum(dense[f"{name}.weight"].numel() for name in matrices)
    assert kept < sizes[0] - held * (4 / 8 + 8 / 32) < kept + 2048  # rotary tables


def test_a_model_that_does_not_fit_is_refused_before_a_weight_is_read(path: Path) -> None:
    quantise(path, FORMATS["gptq 8"])

    class Full(CpuTarget):
        def check_room(self, size: int) -> None:
            raise ConfigError(f"{size} bytes, and there are none")

    with pytest.raises(ConfigError, match="and there are none"):
        load_model(ModelSpec(name="mine", path=str(path)), BLOCK, Full())


def test_ranks_refuse_them(path: Path, tmp_path: Path) -> None:
    quantise(path, FORMATS["awq"])
    spec = ModelSpec(name="mine", path=str(path))

    def refused(group: RankGroup) -> str:
        with pytest.raises(ConfigError) as caught:
            load_model(spec, BLOCK, CPU, Alone(group))
        group.agree(True)  # neither leaves while the other is still connecting
        return caught.value.message

    assert all("a `tensor_parallel` of 1 is right" in message for message in both(tmp_path, refused))
