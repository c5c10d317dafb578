"""Makes a loaded model fast without touching its code: linear layers are fused and packed, norms are
replaced.

Everything is found by structure and kept only if it agrees with the stock module, so that an architecture
nobody thought of is served as it is rather than wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from kvloom.exec.cpu.linear import (
    GatedMLP,
    PackedLinear,
    PackedLinearPart,
    PackedMergedLinear,
    TiedLinear,
    can_pack,
)
from kvloom.exec.huggingface import GATED, QKV, children
from kvloom.exec.parallel.slicing import Summed
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


_NAME = "apply_rotary_pos_emb"
RotaryFunction = Callable[..., tuple[Tensor, Tensor]]


def rotate_both(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotates q, k [1, H, N, D] by cos, sin [1, N, R] in place and returns them; nothing else reads them."""
    for x in (q, k):
        rotate(x[0].transpose(0, 1), cos[0], sin[0])
    return q, k


def fuse_rotary(
    module: nn.Module, turn: RotaryFunction = rotate_both, device: torch.device | None = None
) -> None:
    """Gives this attention module's forward our rotary function for the one its source names, if the two
    agree on `device`. The module's class and its file's globals stay as they are: other models share them."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or _NAME not in forward.__code__.co_names:
        return
    stock = forward.__globals__.get(_NAME)
    if stock is None or not _agrees(stock, turn, device):
        return
    ours = FunctionType(
        forward.__code__,
        forward.__globals__ | {_NAME: turn},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    ours.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(ours, module)


def _agrees(stock: Callable[..., Any], turn: RotaryFunction, device: torch.device | None) -> bool:
    """Compares the two on random q [1, 3, 5, 16], k [1, 1, 5, 16] with the tables that rotate-half models
    have."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 5, 16, generator=generator).to(device) for heads in (3, 1))
    angles = torch.randn(1, 5, 8, generator=generator).repeat(1, 1, 2).to(device)
    try:
        expected = stock(q, k, angles.cos(), angles.sin())
    except (TypeError, RuntimeError, ValueError):
        return False  # it has another form, and is served as it is
    found = turn(q.clone(), k.clone(), angles.cos(), angles.sin())
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(expected, found, strict=True))


_ACTIVATIONS = (("swish", ""), ("gelu", "tanh"), ("gelu", "none"))


def fuse(model: nn.Module) -> None:
    """Fuses and packs in place. The stock weights are let go layer by layer, so that the peak is one
    layer."""
    for parent, name, child in list(children(model)):
        if type(child).__name__.endswith("Attention"):
            _fuse_qkv(child)
            if all(weight.dtype == torch.float32 for weight in child.parameters()):
                fuse_rotary(child)
        elif gated := _gated_like(child):
            setattr(parent, name, gated)
    tied = _shared_weights(model)
    for parent, name, child in list(children(model)):
        if type(child) is nn.Linear and can_pack(child.weight):
            weight, bias = child.weight, child.bias
            if weight.data_ptr() in tied and bias is None and isinstance(weight, nn.Parameter):
                setattr(parent, name, TiedLinear(weight))
            else:
                setattr(parent, name, PackedLinear(weight, bias))
        elif type(child).__name__.endswith("RMSNorm"):
            norm = _norm_like(child)
            if norm is not None:
                setattr(parent, name, norm)


def _shared_weights(model: nn.Module) -> set[int]:
    """Returns the addresses of the weights that an embedding holds too."""
    return {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}


def _linears(module: nn.Module, names: tuple[str, ...]) -> list[nn.Linear] | None:
    """Returns the module's plain linear layers of these names, this rank's part if one is summed; None unless
    all can be packed."""
    found = [getattr(module, name, None) for name in names]
    found = [one.inner if isinstance(one, Summed) else one for one in found]
    linears = [linear for linear in found if type(linear) is nn.Linear and can_pack(linear.weight)]
    return linears if len(linears) == len(names) else None


def _fuse_qkv(module: nn.Module) -> None:
    linears = _linears(module, QKV)
    if linears is None or len({(linear.in_features, linear.bias is None) for linear in linears}) != 1:
        return
    fused = PackedMergedLinear(linears)
    for index, name in enumerate(QKV):
        setattr(module, name, PackedLinearPart(fused, index))


def _gated_like(stock: nn.Module) -> GatedMLP | None:
    """Returns our gated MLP in the stock one's place, or None if that is something else."""
    last = getattr(stock, "down_proj", None)
    group = last.group if isinstance(last, Summed) else None
    linears = _linears(stock, GATED)
    if linears is None:
        return None
    gate, up, down = linears
    probe = torch.randn(1, 4, gate.in_features, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        try:
            expected = stock(probe)
        except (TypeError, ValueError, RuntimeError):
            return None  # it takes more than one input: it is not a plain MLP
        for activation, form in _ACTIVATIONS:
            gated = GatedMLP(gate, up, down, activation, form, group)
            if torch.allclose(gated(probe), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())):
                return gated
    return None


def _norm_like(stock: nn.Module) -> FusedRMSNorm | None:
    """Returns our norm in the stock one's place, or None if the two disagree."""
    weight = getattr(stock, "weight", None)
    eps = getattr(stock, "variance_epsilon", getattr(stock, "eps", None))
    if not isinstance(weight, Tensor) or not isinstance(eps, float) or weight.dtype != torch.float32:
        return None
    probe = torch.randn(5, weight.shape[-1], generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = stock(probe)
        for offset in (0.0, 1.0):
            norm = FusedRMSNorm(weight, eps, offset)
            if torch.allclose(norm(probe), expected, rtol=1e-5, atol=1e-6):
                return norm
    return None
