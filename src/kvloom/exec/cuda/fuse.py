"""Makes a loaded model fast on a device: layers over one input are merged, norms, rotary and gates take one
launch each.

As on the CPU (`exec/cpu/fuse.py`) everything is found by structure. What stands in for a stock module agrees
with it on random input in float32, which shows a factor or a form that half precision would hide; whether the
whole model's logits agree, the loader looks at in the precision that is served.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from kvloom.exec.cpu.fuse import RotaryFunction, fuse_rotary
from kvloom.exec.cpu.linear import MergedLinear, MergedLinearPart, join
from kvloom.exec.cuda.operations import Activation, Operations
from kvloom.exec.huggingface import GATED, QKV, children
from kvloom.exec.parallel.slicing import Summed

_ACTIVATIONS: Final[tuple[Activation, ...]] = ("silu", "gelu_tanh", "gelu")


class DeviceNorm(nn.Module):
    """Computes x / rms(x) · (offset + weight) in one launch."""

    def __init__(self, operations: Operations, weight: Tensor, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self._operations = operations
        self._form = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self._operations.rms_norm(rows, self.weight, *self._form).view(x.shape)


class DeviceGatedMLP(nn.Module):
    """Computes down(activation(gate(x)) ∘ up(x)), with gate and up as one product."""

    def __init__(self, operations: Operations, linears: Sequence[nn.Linear], activation: Activation) -> None:
        super().__init__()
        gate, up, self.down = linears
        self.inner = join((gate, up))
        self.activation = activation
        self._operations = operations

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        rows = self._operations.gated(inner.view(-1, inner.shape[-1]), self.activation)
        out: Tensor = self.down(rows.view(*inner.shape[:-1], -1))
        return out


def fuse_on_device(model: nn.Module, operations: Operations) -> None:
    """Fuses in place. Stock weights are let go module by module, so that the peak is one layer's."""
    served = next(model.parameters()).dtype
    for parent, name, child in list(children(model)):
        if type(child).__name__.endswith("Attention"):
            _fuse_qkv(child)
            fuse_rotary(child, _rotary(operations), next(child.parameters()).device)
        elif gated := _gated_like(child, operations):
            setattr(parent, name, gated)
        elif type(child).__name__.endswith("RMSNorm") and (norm := _norm_like(child, served, operations)):
            setattr(parent, name, norm)


def _linears(module: nn.Module, names: tuple[str, ...], alike: int) -> list[nn.Linear] | None:
    """Returns the module's plain linear layers of these names; the first `alike` take one input, all or none
    with a bias."""
    found = [getattr(module, name, None) for name in names]
    linears = [linear for linear in found if type(linear) is nn.Linear]
    if len(linears) < len(names):
        return None
    forms = {(linear.in_features, linear.bias is None) for linear in linears[:alike]}
    return linears if len(forms) == 1 else None


def _fuse_qkv(module: nn.Module) -> None:
    linears = _linears(module, QKV, 3)
    if linears is None:
        return
    merged = MergedLinear(join(linears), [linear.out_features for linear in linears])
    for index, name in enumerate(QKV):
        setattr(module, name, MergedLinearPart(merged, index))


def _gated_like(stock: nn.Module, operations: Operations) -> nn.Module | None:
    down = getattr(stock, GATED[2], None)
    if not isinstance(down, Summed):
        return _own_gated_like(stock, operations)
    setattr(stock, GATED[2], down.inner)  # a rank's own part is compared, and then summed as before
    gated = _own_gated_like(stock, operations)
    setattr(stock, GATED[2], down)
    return gated and Summed(gated, down.group)


def _own_gated_like(stock: nn.Module, operations: Operations) -> DeviceGatedMLP | None:
    linears = _linears(stock, GATED, 2)
    if linears is None:
        return None
    wide = copy.deepcopy(stock).float()
    parts = _linears(wide, GATED, 2)
    assert parts is not None
    probe = _probe(4, parts[0].in_features, like=parts[0].weight)
    with torch.inference_mode():
        try:
            expected = wide(probe[None])
        except (TypeError, ValueError, RuntimeError):
            return None  # it takes more than one input: it is not a plain MLP
        for activation in _ACTIVATIONS:
            found = DeviceGatedMLP(operations, parts, activation)(probe[None])
            if _agree(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())):
                return DeviceGatedMLP(operations, linears, activation)
    return None


def _norm_like(stock: nn.Module, served: torch.dtype, operations: Operations) -> DeviceNorm | None:
    """Returns our norm in the stock one's place; None if the two disagree, or the weight is kept in another
    number format than what it scales."""
    weight = getattr(stock, "weight", None)
    eps = getattr(stock, "variance_epsilon", getattr(stock, "eps", None))
    if not isinstance(weight, Tensor) or not isinstance(eps, float) or weight.dtype != served:
        return None
    wide = copy.deepcopy(stock).float()
    probe = _probe(5, weight.shape[-1], like=wide.weight)  # type: ignore[arg-type]
    with torch.inference_mode():
        expected = wide(probe)
        for offset in (0.0, 1.0):
            found = DeviceNorm(operations, wide.weight, eps, offset)(probe)  # type: ignore[arg-type]
            if _agree(found, expected, rtol=1e-5, atol=1e-6):
                return DeviceNorm(operations, weight, eps, offset)
    return None


def _rotary(operations: Operations) -> RotaryFunction:
    def rotate_both(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Rotates q, k [1, H, N, D] by cos, sin [1, N, R] in place and returns them; nothing else reads
        them."""
        operations.rotate(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
        return q, k

    return rotate_both


def _probe(rows: int, size: int, like: Tensor) -> Tensor:
    made = torch.randn(rows, size, generator=torch.Generator().manual_seed(0))
    return made.to(like.device, like.dtype)


def _agree(found: Any, expected: Any, *, rtol: float, atol: float) -> bool:
    return (
        isinstance(expected, Tensor)
        and found.shape == expected.shape
        and torch.allclose(found, expected, rtol=rtol, atol=atol)
    )
