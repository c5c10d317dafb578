"""Make a loaded model fast without touching its code: fuse and pack its linear layers, swap its norms.

Everything is found by structure and kept only where it agrees with the stock module, so that an
architecture nobody thought of is served as it is rather than wrongly.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvloom.model.linear import FusedLinear, GatedMLP, PackedLinear, Part, TiedLinear, can_pack
from kvloom.model.norm import FusedRMSNorm
from kvloom.model.parallel.modules import Summed
from kvloom.model.rope import fuse_rotary
from kvloom.model.structure import GATED, QKV, children

_ACTIVATIONS = (("swish", ""), ("gelu", "tanh"), ("gelu", "none"))


def fuse(model: nn.Module) -> None:
    """Fuse and pack in place. The stock weights are let go layer by layer, so that the peak is one layer."""
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
    """Addresses of the weights that an embedding holds too."""
    return {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}


def _linears(module: nn.Module, names: tuple[str, ...]) -> list[nn.Linear] | None:
    """The module's plain linear layers of these names, this rank's part where one is summed, if all can be
    packed."""
    found = [getattr(module, name, None) for name in names]
    found = [one.inner if isinstance(one, Summed) else one for one in found]
    linears = [linear for linear in found if type(linear) is nn.Linear and can_pack(linear.weight)]
    return linears if len(linears) == len(names) else None


def _fuse_qkv(module: nn.Module) -> None:
    linears = _linears(module, QKV)
    if linears is None or len({(linear.in_features, linear.bias is None) for linear in linears}) != 1:
        return
    fused = FusedLinear(linears)
    for index, name in enumerate(QKV):
        setattr(module, name, Part(fused, index))


def _gated_like(stock: nn.Module) -> GatedMLP | None:
    """Our gated MLP in the stock one's place, or None where it is something else."""
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
    """Our norm in the stock one's place, or None where the two disagree."""
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
