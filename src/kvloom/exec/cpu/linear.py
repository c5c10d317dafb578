"""The forms in which a CPU holds weights, and its products over them: those of 32 bits packed once in
oneDNN's layout, those of 16 bits in panels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kvloom.exec.attention import CompiledByRows
from kvloom.exec.cpu.quantized import PackedQuantizedLinear, ReadyRows
from kvloom.kernels.cpu.half import BFLOAT16, FLOAT32, HalfPanels, narrow_formats
from kvloom.kernels.cpu.panels import PANEL
from kvloom.kernels.cpu.products import QUANTIZED, ItemArguments
from kvloom.kernels.reference import Activation

Poll = Callable[[], None]
_ONEDNN: Final = {"silu": ("swish", ""), "gelu_tanh": ("gelu", "tanh"), "gelu": ("gelu", "none")}
_PACK_ROWS = 64  # the layout oneDNN picks for this many rows is the one it wants for any number but 1


def no_poll() -> None:
    """Does nothing between products."""


def can_pack(weight: Tensor) -> bool:
    """Returns True if this weight can be held in oneDNN's own layout, or in panels of 16 bits."""
    if weight.device.type != "cpu" or weight.dtype in narrow_formats():
        return weight.device.type == "cpu"
    return (
        weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class PackedLinear(CompiledByRows):
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

    def __init__(self, gate: Linear, up: Linear, down: Linear, activation: Activation) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down
        self.activation = activation

    @classmethod
    def of(cls, linears: Sequence[nn.Linear], activation: Activation) -> Self:
        gate, up, down = (packed(linear) for linear in linears)
        return cls(gate, up, down, activation)

    def forward(self, x: Tensor, poll: Poll = no_poll) -> Tensor:
        """poll: called after all but the last product, here and in `onto`."""
        out: Tensor = self.down(self._inner(x, poll))
        return out

    def onto(self, x: Tensor, base: Tensor, poll: Poll = no_poll) -> Tensor:
        """Returns base + what `forward` gives, added as it is stored."""
        return self.down.onto(self._inner(x, poll), base)

    def _inner(self, x: Tensor, poll: Poll) -> Tensor:
        gates = self.gate.activated(x, *_ONEDNN[self.activation])
        poll()
        inner = self.up.times(x, gates)
        poll()
        return inner


class HalfLinear(nn.Module):
    """Computes x [..., K] · weight [N, K]ᵀ + bias [N] in float32 over a weight of 16 bits in panels. It gives
    a row the same, whatever rows are beside it."""

    def __init__(self, panels: HalfPanels, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = panels.width, panels.depth
        self.panels = panels
        self.bias = wide_bias(bias, panels.count)  # with room for whole panels

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x)

    def activated(self, x: Tensor, activation: str, form: str = "") -> Tensor:
        """Returns activation(x · weightᵀ + bias). activation, form: oneDNN's names."""
        out = self._product(x)
        return (
            functional.silu(out, inplace=True)
            if activation == "swish"
            else functional.gelu(out, approximate=form)
        )

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """Returns (x · weightᵀ + bias) ∘ factor."""
        return self._product(x).mul_(factor)

    def onto(self, x: Tensor, base: Tensor) -> Tensor:
        """Returns base + x · weightᵀ + bias, added as it is stored."""
        return self._product(x, base.reshape(-1, self.out_features))

    def _product(self, x: Tensor, base: Tensor | None = None) -> Tensor:
        out = self.panels.product(x.reshape(-1, self.in_features), self.bias, base)
        return out.view(*x.shape[:-1], self.out_features)


class HalfEmbedding(nn.Module):
    """Returns rows of a weight [V, K] of 16 bits in float32, out of the panels that a tied head has."""

    def __init__(self, panels: HalfPanels) -> None:
        super().__init__()
        self.panels = panels

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.panels.rows(ids.flatten().to(torch.int32))
        return rows.view(*ids.shape, self.panels.depth)


Linear = PackedLinear | HalfLinear | PackedQuantizedLinear


def packed(linear: nn.Linear) -> Linear:
    """Returns the layer with its weight packed."""
    if linear.weight.dtype == torch.float32:
        return PackedLinear.of(linear)
    return HalfLinear(HalfPanels(linear.weight.detach()), linear.bias)


def wide_bias(bias: Tensor | None, panels: int) -> Tensor:
    """Returns the bias, zeros if there is none, with room for whole panels."""
    wide = torch.zeros(panels * PANEL)
    if bias is not None:
        wide[: len(bias)] = bias
    return wide


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A packed weight as the one-kernel step reads it, whatever its form: its panels, and its bias with room
    for whole panels. It holds what its addresses need."""

    form: int
    address: int
    count: int
    stride: int
    depth: int
    bias: Tensor
    held: object
    rounds: int = 0
    at: int = 0

    @property
    def fields(self) -> tuple[int, ...]:
        """Returns the values of a LinearArguments but for its stage's."""
        form = self.form, self.address, self.count, self.stride, self.depth, self.bias.data_ptr()
        return *form, self.rounds, self.at


class Stage:
    """Holds the products of one input, in the one-kernel step."""

    def __init__(self, weights: Sequence[PackedWeight], ready: ReadyRows) -> None:
        self.weights = weights
        self.ready_bytes = ready.size
        """The bytes of the form into which its products bring a row of inputs before they multiply."""
        self._parts = ready.parts()

    @property
    def fields(self) -> Iterator[tuple[int, ...]]:
        """Yields the values of the products' LinearArguments."""
        parts = ctypes.addressof(self._parts), len(self._parts)
        for weight in self.weights:
            yield *weight.fields, *parts


def stage_of(linears: Sequence[Linear]) -> Stage | None:
    """Returns the products of one input; None if the kernel cannot read a weight."""
    ready = ReadyRows()
    weights = [found for linear in linears if (found := packed_weight(linear, ready))]
    return Stage(weights, ready) if len(weights) == len(linears) else None


def packed_weight(linear: Linear, ready: ReadyRows) -> PackedWeight | None:
    """Returns the layer's weight for the kernel; None if that cannot read a quantised one, or this machine's
    oneDNN keeps float32 in another layout: every value is looked at. ready: of all products of the same
    input."""
    if isinstance(linear, PackedQuantizedLinear):
        items = linear.items(ready)
        if items is None:
            return None
        stride, kept = ctypes.sizeof(ItemArguments), (items, linear.panels)
        wide = wide_bias(linear.bias, len(items))
        return PackedWeight(
            QUANTIZED, ctypes.addressof(items), len(items), stride, linear.in_features, wide, kept
        )
    if isinstance(linear, HalfLinear):
        one = linear.panels
        rounded = (one.rounds_at, ready.place_rounded(one)) if one.form == BFLOAT16 else (0, 0)
        return PackedWeight(
            one.form, one.address, one.count, one.stride, one.depth, linear.bias, one, *rounded
        )
    width, depth = linear.packed.shape
    size, count = torch.ops.mkldnn._nbytes(linear.packed), -(-width // PANEL)
    if size % (count * PANEL * 4) or size < count * PANEL * depth * 4:
        return None
    address: int = torch.ops.mkldnn.data_ptr(linear.packed)
    memory = (ctypes.c_float * (size // 4)).from_address(address)
    held = torch.from_numpy(np.frombuffer(memory, np.float32)).view(count, -1, PANEL)
    rows = held[:, :depth].transpose(1, 2).flatten(0, 1)[:width]
    if not rows.equal(linear.packed.to_dense()):
        return None
    bias = wide_bias(linear.bias, count)
    return PackedWeight(FLOAT32, address, count, size // count, depth, bias, linear.packed)
