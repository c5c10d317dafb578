"""The forms in which a CPU holds weights, and its products over them: packed once in oneDNN's layout."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Final, Self

import numpy as np
import torch
from torch import Tensor, nn

from kvloom.kernels.cpu.products import PANEL
from kvloom.kernels.reference import Activation

Between = Callable[[], None]
_ONEDNN: Final = {"silu": ("swish", ""), "gelu_tanh": ("gelu", "tanh"), "gelu": ("gelu", "none")}
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

    @classmethod
    def of(cls, linear: nn.Linear) -> Self:
        return cls(linear.weight, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.activated(x, "none")

    def activated(self, x: Tensor, activation: str, form: str = "") -> Tensor:
        """Returns activation(x · weightᵀ + bias), with the activation applied as the product is stored.
        activation, form: oneDNN's names."""
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
    stored."""

    def __init__(
        self, gate: PackedLinear, up: PackedLinear, down: PackedLinear, activation: Activation
    ) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down
        self.activation = activation

    @classmethod
    def of(cls, linears: Sequence[nn.Linear], activation: Activation) -> Self:
        gate, up, down = (PackedLinear.of(linear) for linear in linears)
        return cls(gate, up, down, activation)

    def forward(self, x: Tensor, between: Between = at_once) -> Tensor:
        """between: called after all but the last product, here and in `onto`."""
        out: Tensor = self.down(self._inner(x, between))
        return out

    def onto(self, x: Tensor, base: Tensor, between: Between = at_once) -> Tensor:
        """Returns base + what forward gives, added as it is stored."""
        return self.down.onto(self._inner(x, between), base)

    def _inner(self, x: Tensor, between: Between) -> Tensor:
        gates = self.gate.activated(x, *_ONEDNN[self.activation])
        between()
        inner = self.up.times(x, gates)
        between()
        return inner


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
