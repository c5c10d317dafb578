"""The CPU's replacements for a model's stock modules: packed products, and float32 kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvloom.exec.cpu.linear import GatedMLP, PackedLinear, TiedLinear, can_pack
from kvloom.exec.fuse import Replacements, fuse
from kvloom.exec.huggingface import children
from kvloom.kernels.cpu import rms_norm, rotate


class FusedRMSNorm(nn.Module):
    """Computes x / rms(x) · (offset + weight) in one pass."""

    def __init__(self, weight: Tensor, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return rms_norm(rows, self.weight, self.eps, self.offset).view(x.shape)


def rotate_both(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotates q, k [1, H, N, D] by cos, sin [1, N, R] in place and returns them; nothing else reads them."""
    for x in (q, k):
        rotate(x[0].transpose(0, 1), cos[0], sin[0])
    return q, k


_OURS = Replacements(can_pack, PackedLinear.of, GatedMLP.of, FusedRMSNorm, rotate_both)


def fuse_on_cpu(model: nn.Module) -> None:
    """Fuses a float32 model in place, and packs the products that are left; others stay as they are."""
    if any(weight.dtype != torch.float32 for weight in model.parameters()):
        return
    fuse(model, _OURS)
    shared = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    for parent, name, child in list(children(model)):
        if type(child) is not nn.Linear or not can_pack(child.weight):
            continue
        weight = child.weight
        if weight.data_ptr() in shared and child.bias is None and isinstance(weight, nn.Parameter):
            setattr(parent, name, TiedLinear(weight))
        else:
            setattr(parent, name, PackedLinear.of(child))
