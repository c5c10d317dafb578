"""The CPU's replacements for a model's stock modules: packed products over weights of 32 or 16 bits, and
float32 kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from kvloom.exec.cpu.linear import GatedMLP, HalfEmbedding, HalfLinear, TiedLinear, can_pack, packed
from kvloom.exec.cpu.quantized import PackedQuantizedLinear, QuantizedEmbedding, pack_quantized
from kvloom.exec.fuse import STOCK, MergedLinearPart, Replacements, fuse, fuse_quantized
from kvloom.exec.gguf.blocks import MappedEmbedding
from kvloom.exec.huggingface import children
from kvloom.exec.quantized import QuantizedLinear
from kvloom.exec.widened import WidenedEmbedding, WidenedLinear, computes_in_float32
from kvloom.kernels.cpu import rms_norm, rotate
from kvloom.kernels.cpu.half import HalfPanels
from kvloom.kernels.reference import Activation


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


_OURS = Replacements(can_pack, packed, GatedMLP.of, FusedRMSNorm, rotate_both)


def fuse_on_cpu(model: nn.Module) -> None:
    """Fuses a model that computes in float32 in place, and packs the products that are left. Others stay as
    they are, but for quantised layers, which are packed."""
    wide = computes_in_float32(model)
    if wide:
        fuse_quantized(model, PackedQuantizedLinear.of, _gated)
    pack_quantized(model)
    _look_up_in_head(model)
    if not wide:
        return
    _share_panels(model)  # first: it is the largest weight, and takes room for two
    fuse(model, _OURS)
    shared = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    for parent, name, child in children(model):
        if not isinstance(child, nn.Linear) or type(child) not in STOCK or not can_pack(child.weight):
            continue
        weight = child.weight
        if weight.data_ptr() in shared and child.bias is None and isinstance(weight, nn.Parameter):
            setattr(parent, name, TiedLinear(weight))
        else:
            setattr(parent, name, packed(child))


def _share_panels(model: nn.Module) -> None:
    """Holds a weight of 16 bits that an embedding and linear layers share in panels for all of them."""
    places = list(children(model))
    for parent, name, child in places:
        if not isinstance(child, WidenedEmbedding) or not can_pack(child.weight):
            continue
        tied = [
            (owner, head, linear)
            for owner, head, linear in places
            if isinstance(linear, WidenedLinear) and linear.weight is child.weight
        ]
        if tied:
            panels = HalfPanels(child.weight.detach())
            setattr(parent, name, HalfEmbedding(panels))
            for owner, head, linear in tied:
                setattr(owner, head, HalfLinear(panels, linear.bias))


def _look_up_in_head(model: Any) -> None:
    """Lets an embedding that is tied to a quantised head have its rows of the head's panels, so that no page
    of the file stays in memory for them."""
    for parent, name, child in children(model):
        if isinstance(child, MappedEmbedding) and model.config.tie_word_embeddings:
            head = model.get_output_embeddings()
            if isinstance(head, PackedQuantizedLinear):
                setattr(parent, name, QuantizedEmbedding(head.panels[0], child.dtype))


def _gated(linears: Sequence[QuantizedLinear]) -> Callable[[Activation], nn.Module]:
    gate, up, down = (PackedQuantizedLinear.of([linear]) for linear in linears)
    return lambda activation: GatedMLP(gate, up, down, activation)


def round_inputs(model: nn.Module) -> None:
    """Lets a model's products round what they multiply from now on: to 8 bits if their weights are quantised,
    to bfloat16 if these are bfloat16 and the processor multiplies pairs of it."""
    for module in model.modules():
        product = module.product if isinstance(module, MergedLinearPart) else module
        if isinstance(product, PackedQuantizedLinear):
            product.exact = False
        elif isinstance(product, HalfLinear):
            product.panels.round_inputs()
