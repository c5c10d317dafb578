"""A model is served by a fused decoder if that does what its own modules do, else by its modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from kvloom.exec.attention import Modular
from kvloom.exec.cpu import small_batch
from kvloom.exec.cpu.decoder import FusedDecoder, fuse_decoder
from kvloom.exec.cpu.linear import PackedLinear, packed_weight
from kvloom.exec.cpu.quantized import ReadyRows
from tests.checkpoints import ARCHITECTURES, VOCAB, make_checkpoint
from tests.exec.batches import Batch
from tests.exec.loading import load

FUSED = {"llama", "qwen2", "qwen3", "mistral", "llama_yarn"}
FORMS = [*((one, "float32") for one in sorted(FUSED)), ("llama", "bfloat16"), ("qwen3", "bfloat16")]
"""Architectures, and the formats of their weights."""


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_which_models_are_fused(architecture: str, tmp_path: Path) -> None:
    forward = load(make_checkpoint(tmp_path, architecture)).forward
    assert isinstance(forward, FusedDecoder if architecture in FUSED else Modular)


def enliven(path: Path) -> None:
    """Give biases and norms, which start as zeros and ones, values of their own."""
    tensors = load_file(path / "model.safetensors")
    for tensor in tensors.values():
        if tensor.dim() == 1:
            tensor.add_(0.3 * torch.randn(len(tensor), generator=torch.Generator().manual_seed(len(tensor))))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("rows", [1, 2, 5, 9])
@pytest.mark.parametrize("limit", [0, 100])  # layer by layer, and all in one kernel
@pytest.mark.parametrize("architecture", sorted(FUSED))
def test_a_fused_decoder_gives_what_the_modules_give(
    architecture: str, limit: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of different lengths, whose K and V the same forward has written; some rows asked for, one
    of them twice. Sizes are no multiples of a panel's."""
    monkeypatch.setattr(small_batch, "SMALL_BATCH_ROWS", limit)
    path = make_checkpoint(tmp_path, architecture, vocab_size=VOCAB + 13, intermediate_size=88)
    enliven(path)
    model = load(path)
    assert isinstance(model.forward, FusedDecoder)
    lengths = [(7 * i) % 40 + 1 for i in range(rows)]
    kept = np.array([*range(0, rows, 2), rows - 1, 0])
    tokens = np.random.default_rng(rows).integers(0, VOCAB, (3, sum(lengths)))
    found = []
    for forward in (model.forward, Modular(model.module)):
        batch = Batch(model.geometry, rows)
        answers = [batch.forward(forward, tokens[0], lengths, np.cumsum(lengths) - 1)]
        answers += [batch.forward(forward, tokens[i, :rows], [1] * rows, kept) for i in (1, 2)]
        found.append(answers)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def scaled(layer: Any) -> None:
    """What is after attention counts double."""
    stock = layer.forward
    layer.forward = lambda *given, **named: 2 * stock(*given, **named)


def with_a_gate(layer: Any) -> None:
    layer.register_parameter("gate", nn.Parameter(torch.ones(1)))


def with_another_norm(layer: Any) -> None:
    layer.another = nn.Identity()


@pytest.mark.parametrize("change", [scaled, with_a_gate, with_another_norm])
def test_a_layer_that_does_more_keeps_its_modules(change: Any, tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path, "qwen3"))
    forward: Any = model.forward
    scorings = {layer.index: layer.scoring for layer in forward._parts.layers}
    assert fuse_decoder(model.module, scorings, model.geometry) is not None
    module: Any = model.module
    change(module.model.layers[1])
    assert fuse_decoder(model.module, scorings, model.geometry) is None


@pytest.mark.parametrize("shape", [(64, 32), (96, 64), (100, 60), (7, 5)])
def test_panels_are_the_weight(shape: tuple[int, int]) -> None:
    bias = torch.randn(shape[0])
    linear = PackedLinear(torch.randn(shape), bias)
    panels = packed_weight(linear, ReadyRows())
    assert panels is not None
    assert panels.bias[: shape[0]].equal(bias)


def test_another_layout_is_no_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = PackedLinear(torch.randn(64, 64), None)
    other = PackedLinear(linear.packed.to_dense().t().contiguous(), None)
    assert packed_weight(linear, ReadyRows()) is not None
    real = torch.ops.mkldnn.data_ptr
    monkeypatch.setattr(torch.ops.mkldnn, "data_ptr", lambda _: real(other.packed))
    assert packed_weight(linear, ReadyRows()) is None
