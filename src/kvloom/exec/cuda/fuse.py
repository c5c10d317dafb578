"""A GPU's replacements for a model's stock modules: norms, rotary and gates of one launch each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from kvloom.exec.cuda.operations import Operations
from kvloom.exec.cuda.quantized import DeviceQuantizedLinear
from kvloom.exec.fuse import Replacements, fuse, fuse_quantized, join
from kvloom.exec.huggingface import children
from kvloom.exec.quantized import QuantizedLinear
from kvloom.kernels.reference import Activation


class DeviceNorm(nn.Module):
    """Computes x / rms(x) · (offset + weight) in one launch."""

    def __init__(self, operations: Operations, weight: Tensor, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self._operations = operations
        self._form = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        heads = x.dim() == 4 and len(x) == 1  # [1, N, heads, D], perhaps a part of a merged product's columns
        rows = x[0] if heads else x.reshape(-1, x.shape[-1])
        return self._operations.rms_norm(rows, self.weight, *self._form).view(x.shape)


class DeviceGatedMLP(nn.Module):
    """Computes down(activation(gate(x)) ∘ up(x)), with gate and up as one product, `inner`."""

    def __init__(
        self, operations: Operations, inner: nn.Module, down: nn.Module, activation: Activation
    ) -> None:
        super().__init__()
        self.inner = inner
        self.down = down
        self.activation = activation
        self._operations = operations

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        rows = self._operations.gated(inner.view(-1, inner.shape[-1]), self.activation)
        out: Tensor = self.down(rows.view(*inner.shape[:-1], -1))
        return out


def fuse_on_device(model: nn.Module, operations: Operations) -> None:
    """Fuses in place by what `operations` has."""

    def rotate_both(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Rotates q, k [1, H, N, D] by cos, sin [1, N, R] in place and returns them; nothing else reads
        them."""
        operations.rotate(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
        return q, k

    def gated(linears: Sequence[nn.Linear], activation: Activation) -> nn.Module:
        return DeviceGatedMLP(operations, join(linears[:2]), linears[2], activation)

    def product(linears: Sequence[QuantizedLinear]) -> nn.Module | None:
        return DeviceQuantizedLinear.of(operations, linears)

    def gated_quantized(linears: Sequence[QuantizedLinear]) -> Callable[[Activation], nn.Module] | None:
        inner, down = product(linears[:2]), product(linears[2:])
        return inner and down and partial(DeviceGatedMLP, operations, inner, down)

    fuse_quantized(model, product, gated_quantized)
    for parent, name, child in children(model):
        if type(child) is QuantizedLinear:
            setattr(parent, name, product([child]))
    ours = Replacements(
        fits=lambda weight: True,
        product=lambda joined: joined,
        gated=gated,
        norm=partial(DeviceNorm, operations),
        rotate=rotate_both,
    )
    fuse(model, ours)
