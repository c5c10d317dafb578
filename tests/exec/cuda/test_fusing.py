"""What stands in for stock modules on a device, and what does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from kvloom.exec.cuda.layers import DeviceGatedMLP, DeviceNorm, ResidualLayer, fuse_on_device
from kvloom.exec.cuda.operations import plain_operations
from kvloom.exec.fuse import MergedLinearPart
from kvloom.kernels import reference
from tests.checkpoints import make_checkpoint


def fused(path: Path, architecture: str) -> tuple[Any, dict[type, int]]:
    model: Any = AutoModelForCausalLM.from_pretrained(
        make_checkpoint(path, architecture), dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    fuse_on_device(model, plain_operations())
    kinds = [type(module) for module in model.modules()]
    return model, {kind: kinds.count(kind) for kind in (MergedLinearPart, DeviceNorm, DeviceGatedMLP)}


def adding(model: nn.Module) -> int:
    """Returns the number of decoder layers whose norms add residuals."""
    return sum(isinstance(module.forward, ResidualLayer) for module in model.modules())


@pytest.mark.parametrize(
    ("architecture", "merged", "norms", "gated", "turned", "added"),
    [
        ("llama", 9, 7, 3, 3, 3),
        ("mistral", 9, 7, 3, 3, 3),
        ("qwen3", 9, 13, 3, 3, 3),  # each head's q and k are normed too
        ("gemma2", 12, 17, 4, 4, 4),  # four norms a layer
        ("gpt_neox", 0, 0, 0, 3, 0),  # its q, k and v are one product, its norms no RMS
        ("mixtral", 9, 7, 0, 3, 0),  # experts
    ],
)
def test_found_by_structure_in_half_precision(
    tmp_path: Path, architecture: str, merged: int, norms: int, gated: int, turned: int, added: int
) -> None:
    """turned: attention modules whose forward calls our rotary function. added: see `adding`."""
    model, counts = fused(tmp_path, architecture)
    assert counts == {MergedLinearPart: merged, DeviceNorm: norms, DeviceGatedMLP: gated}
    assert adding(model) == added
    assert sum("forward" in vars(module) for module in model.modules()) == turned + added
    ids = torch.arange(12)[None]
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.inference_mode():
        found, wanted = model(input_ids=ids).logits, stock(input_ids=ids).logits
    assert float((found - wanted).abs().max()) <= 0.05 * float(wanted.abs().max())


class OddRMSNorm(nn.Module):
    """Differs by a factor that bfloat16 does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return 1.0005 * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def test_a_norm_that_is_another_is_left_as_it_is() -> None:
    model = nn.Sequential(OddRMSNorm())
    fuse_on_device(model, plain_operations())
    assert type(model[0]) is OddRMSNorm


def test_norms_of_heads_read_their_part_of_a_merged_product() -> None:
    """Where it lies, without a copy."""
    asked: list[Tensor] = []

    def watched(x: Tensor, *form: Any) -> Tensor:
        asked.append(x)
        return reference.rms_norm(x, *form)

    product = torch.randn(1, 5, 3 * 16)
    heads = product[..., 16:].view(1, 5, 2, 16)
    norm = DeviceNorm(replace(plain_operations(), rms_norm=watched), torch.rand(16), 1e-6, 0.0)
    found = norm(heads)
    assert asked[0].data_ptr() == heads.data_ptr()
    assert torch.equal(found, reference.rms_norm(heads, norm.weight, 1e-6))


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_each_sum_is_done_by_the_norm_that_reads_it(tmp_path: Path, architecture: str) -> None:
    """So it is a launch of none of its own, and no norm is computed twice; the numbers stay the same to the
    last bit."""
    launched: list[str] = []

    def watched(name: str) -> Any:
        operation = getattr(plain_operations(), name)

        def launch(*given: Any) -> Tensor:
            launched.append(name)
            out: Tensor = operation(*given)
            return out

        return launch

    model: Any = AutoModelForCausalLM.from_pretrained(
        make_checkpoint(tmp_path, architecture), dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    names = "rms_norm", "add_rms_norm"
    fuse_on_device(model, replace(plain_operations(), **{name: watched(name) for name in names}))
    ids, layers = torch.arange(12)[None], model.config.num_hidden_layers
    launched.clear()
    with torch.inference_mode():
        found = model(input_ids=ids).logits
    assert launched.count("add_rms_norm") == 2 * layers
    assert launched.count("rms_norm") == 1 + (2 * layers if architecture == "gemma2" else 0)
    for module in model.modules():
        if isinstance(module.forward, ResidualLayer):
            del module.forward
    launched.clear()
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids).logits, found)
    assert "add_rms_norm" not in launched


def test_a_layer_that_scales_what_it_adds_keeps_its_sums(tmp_path: Path) -> None:
    """Granite's have the parts of Llama's, by name."""
    model, counts = fused(tmp_path, "granite")
    assert counts[DeviceGatedMLP]
    assert adding(model) == 0
