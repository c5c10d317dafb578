"""Linear layers as fast as the machine allows: weights are packed once, layers over one input are merged into
one product."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from kvloom.exec.parallel.group import RankGroup
from kvloom.exec.parallel.slicing import Summed
from kvloom.kernels.cpu.products import PANEL


class _Last(threading.local):
    """The last product of the calling thread, kept until each merged layer has taken its part."""

    x: Tensor | None = None
    parts: Sequence[Tensor] = ()
    left: int = 0


class MergedLinear:
    """Several linear layers over the same input as one product, whose columns are split by `sizes`. Each
    layer keeps its place in the model as a `MergedLinearPart`; the first to be called computes for all. Jobs
    on other threads do not see this one's product."""

    def __init__(self, product: nn.Module, sizes: Sequence[int]) -> None:
        self.product = product
        self._sizes = list(sizes)
        self._last = _Last()

    def part(self, x: Tensor, index: int) -> Tensor:
        last = self._last
        if last.x is not x:
            last.x, last.left = x, len(self._sizes)
            last.parts = self.product(x).split(self._sizes, -1)
        part = last.parts[index]
        last.left -= 1
        if not last.left:
            last.x, last.parts = None, ()
        return part


class MergedLinearPart(nn.Module):
    def __init__(self, merged: MergedLinear, index: int) -> None:
        super().__init__()
        self._merged = merged
        self._index = index

    @property
    def product(self) -> nn.Module:
        """The product of all merged layers."""
        return self._merged.product

    def forward(self, x: Tensor) -> Tensor:
        return self._merged.part(x, self._index)


def join(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Returns one product whose columns are those of the layers, side by side. All have a bias, or none."""
    first, width = linears[0], sum(linear.out_features for linear in linears)
    together = nn.Linear(first.in_features, width, bias=first.bias is not None, device="meta")
    together.weight = _frozen([linear.weight for linear in linears])
    if first.bias is not None:
        together.bias = _frozen([linear.bias for linear in linears])
    return together


def _frozen(parts: Sequence[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat(list(parts)), requires_grad=False)


# oneDNN's kernels for 4 rows read the weights faster than those for 1 to 3 do (seen on Zen 4: 33 → 44 GB/s),
# so the executor never brings fewer.
MIN_ROWS = 4
Between = Callable[[], None]
_PACK_ROWS = 64  # the layout oneDNN picks for this many rows is the one it wants for any number but 1


def at_once() -> None:
    """Does nothing between products."""


def can_pack(weight: Tensor) -> bool:
    """Returns True if oneDNN can hold this weight in its own layout."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class PackedLinear(nn.Module):
    """Computes x [..., K] · weight [N, K]ᵀ + bias [N], with the weight kept in oneDNN's blocked layout
    alone."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACK_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return self.activated(x, "none")

    def activated(self, x: Tensor, activation: str, form: str = "") -> Tensor:
        """Returns activation(x · weightᵀ + bias), with the activation applied as the product is stored."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, activation, [], form)
        return out

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """Returns (x · weightᵀ + bias) ∘ factor, likewise."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, factor, self.packed, self.bias, "mul")
        return out

    def onto(self, x: Tensor, base: Tensor) -> Tensor:
        """Returns base + x · weightᵀ + bias, likewise."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, base, self.packed, self.bias, "add")
        return out


class TiedLinear(nn.Module):
    """A head that shares the embedding's weight [N, K], and so cannot be packed: weight · xᵀ, whose kernels
    beat x · weightᵀ by 1.2× to 4× on MKL for a few rows."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return torch.mm(self.weight, rows.t()).t().reshape(*x.shape[:-1], self.weight.shape[0])


class GatedMLP(nn.Module):
    """Computes down(activation(gate(x)) ∘ up(x)), with the activation and the product done as gate and up are
    stored. The sum of down is over ranks, if there is a `group`. activation, form: oneDNN's names."""

    def __init__(
        self,
        gate: nn.Linear,
        up: nn.Linear,
        down: nn.Linear,
        activation: str,
        form: str,
        group: RankGroup | None = None,
    ) -> None:
        super().__init__()
        self.gate, self.up, own = (PackedLinear(part.weight, part.bias) for part in (gate, up, down))
        self.down: PackedLinear | Summed = own if group is None else Summed(own, group)
        self.activation = activation
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self._inner(x))
        return out

    def onto(self, x: Tensor, base: Tensor, between: Between = at_once) -> Tensor:
        """Returns base + what forward gives, added as it is stored. between: called after all but the last
        product."""
        return self.down.onto(self._inner(x, between), base)

    def _inner(self, x: Tensor, between: Between = at_once) -> Tensor:
        gates = self.gate.activated(x, self.activation, self.form)
        between()
        inner = self.up.times(x, gates)
        between()
        return inner


class PackedMergedLinear(MergedLinear):
    """A merged linear layer whose product is packed; each layer keeps its place in the model as a
    `PackedLinearPart`."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weight = torch.cat([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears]
        bias = torch.cat([b for b in biases if b is not None]) if biases[0] is not None else None
        self.linear = PackedLinear(weight, bias)
        super().__init__(self.linear, [linear.out_features for linear in linears])


class PackedLinearPart(MergedLinearPart):
    """One layer of a `PackedMergedLinear`."""

    def __init__(self, fused: PackedMergedLinear, index: int) -> None:
        super().__init__(fused, index)
        self._fused = fused

    @property
    def linear(self) -> PackedLinear:
        """The product of all merged layers, side by side."""
        return self._fused.linear


class Panels:
    """A packed weight's panels, and its bias with room for whole panels. It holds what its addresses need."""

    def __init__(self, packed: Tensor, bias: Tensor | None) -> None:
        self.width, self.depth = packed.shape
        self.count = -(-self.width // PANEL)
        self.stride = torch.ops.mkldnn._nbytes(packed) // self.count
        self.address: int = torch.ops.mkldnn.data_ptr(packed)
        self.bias = torch.zeros(self.count * PANEL)
        if bias is not None:
            self.bias[: self.width] = bias
        self._packed = packed

    @property
    def fields(self) -> tuple[int, int, int, int, int]:
        """The values of a LinearArguments."""
        return self.address, self.count, self.stride, self.depth, self.bias.data_ptr()


def panels_of(linear: PackedLinear) -> Panels | None:
    """Returns None if this machine's oneDNN keeps the weight in another layout: every value is looked at."""
    size = torch.ops.mkldnn._nbytes(linear.packed)
    panels = Panels(linear.packed, linear.bias)
    wide = panels.count * PANEL
    if size % (wide * 4) or size < wide * panels.depth * 4:
        return None
    memory = (ctypes.c_float * (size // 4)).from_address(panels.address)
    held = torch.from_numpy(np.frombuffer(memory, np.float32)).view(panels.count, -1, PANEL)
    rows = held[:, : panels.depth].transpose(1, 2).flatten(0, 1)[: panels.width]
    return panels if rows.equal(linear.packed.to_dense()) else None
