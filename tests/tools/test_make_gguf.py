"""The GGUF files that benchmarks ask kvloom and llama.cpp with: they are the checkpoint's model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from tools.k_quants import q4_k, q6_k
from tools.make_gguf import ARCHITECTURES, make_gguf

from kvloom.exec.gguf.header import read_header
from tests.checkpoints import make_checkpoint
from tests.exec.loading import load
from tests.exec.test_quantized_models import logits


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_gguf_file_is_its_checkpoint(architecture: str, tmp_path: Path) -> None:
    biases = {"attention_bias": False, "mlp_bias": False} if architecture == "llama" else {}
    source = make_checkpoint(tmp_path / "source", architecture, **biases)
    file = make_gguf(source, tmp_path / "model.gguf")
    ids = torch.arange(2, 40)
    torch.testing.assert_close(logits(load(file).module, ids), logits(load(source).module, ids))


@pytest.mark.parametrize(("encode", "form", "most"), [(q4_k, Type.Q4_K, 0.1), (q6_k, Type.Q6_K, 0.03)])
def test_blocks_of_256_are_near_the_numbers(encode: Callable[[Any], Any], form: Type, most: float) -> None:
    numbers = np.random.default_rng(0).normal(size=(7, 512)).astype(np.float32)
    found = gguf.dequantize(encode(numbers), form)
    assert np.sqrt(np.mean((found - numbers) ** 2)) < most
    numbers[:] = 0
    assert not gguf.dequantize(encode(numbers), form).any()


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "head_dim": 64}
    source = make_checkpoint(tmp_path / "source", "qwen3", tie_word_embeddings=True, **sizes)
    file = make_gguf(source, tmp_path / "model.gguf", "q4_k_m")
    types = {name: one.type.name for name, one in read_header(file).tensors.items()}
    assert {types[f"blk.{layer}.ffn_down.weight"] for layer in (0, 3, 7)} == {"Q6_K"}
    assert types["token_embd.weight"] == "Q6_K"
    assert types["blk.1.attn_v.weight"] == types["blk.0.attn_q.weight"] == "Q4_K"
    assert types["output_norm.weight"] == "F32"
    assert load(file).card.parameters == load(source).card.parameters


def test_rows_that_are_no_whole_blocks(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen3", hidden_size=64, intermediate_size=512)
    with pytest.raises(ValueError, match=r"is 64 wide, and q4_k_m takes multiples of 256; a checkpoint of"):
        make_gguf(source, tmp_path / "model.gguf", "q4_k_m")
    assert not (tmp_path / "model.gguf").exists()
