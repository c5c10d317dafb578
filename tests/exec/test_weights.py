"""Weights are held once, packed, fused or tied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from kvloom.exec.cpu.linear import PackedLinear
from kvloom.exec.fuse import MergedLinearPart
from tests.checkpoints import make_checkpoint
from tests.exec.loading import load


def tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Every tensor that the module keeps, those in oneDNN's layout and in merged layers included."""
    yield from module.parameters()
    parts = (one.product if isinstance(one, MergedLinearPart) else one for one in module.modules())
    for linear in {id(one): one for one in parts if isinstance(one, PackedLinear)}.values():
        yield linear.packed
        if linear.bias is not None:
            yield linear.bias


def weight_bytes(module: nn.Module) -> int:
    held = {(t if t.is_mkldnn else t.data_ptr()): t.numel() * t.element_size() for t in tensors(module)}
    return sum(held.values())


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "phi3", "gpt_neox"])  # llama's head is tied
def test_weights_are_held_once(architecture: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, architecture)
    model = load(path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    whole = sum(p.numel() * 4 for p in stock.parameters())
    assert model.card.parameters * 4 == whole
    assert whole <= weight_bytes(model.module) <= whole * 1.02  # oneDNN pads odd sizes a little


@pytest.mark.parametrize("tied", [True, False])
def test_heads_tied_and_not(tied: bool, tmp_path: Path) -> None:
    """The prove step has compared the logits; here, that a tied head is the embedding."""
    path = make_checkpoint(tmp_path, "qwen2", tie_word_embeddings=tied)
    module: Any = load(path).module
    head, embedding = module.lm_head, module.get_input_embeddings().weight
    if tied:
        assert head.weight.data_ptr() == embedding.data_ptr()
    else:
        assert isinstance(head, PackedLinear)
