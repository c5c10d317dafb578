"""Linear layers over weights of 8 or 4 bits on CPUs: one packed copy of the codes, which kernels read."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import groupby
from typing import Final, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvloom.exec.huggingface import children
from kvloom.exec.quantized import Bits, QuantizedLinear, QuantizedWeight, to_halves
from kvloom.kernels.cpu.half import HalfPanels
from kvloom.kernels.cpu.lanes.floats import HAS_HALF
from kvloom.kernels.cpu.products import ItemArguments, ReadyArguments
from kvloom.kernels.cpu.quantized import (
    STEP,
    WIDTH,
    ProductArguments,
    QuantizedArguments,
    multiply_quantized,
    ready_bytes,
)

_FLOAT: Final = 4  # bytes
_LINE: Final = 64  # bytes
_UNIT: Final = 32  # inputs that are rounded with one scale
_WIDEN_ROWS: Final = 96  # more rows of float32 are faster by torch's products over widened weights
_WIDEN_NUMBERS: Final = 1 << 20  # numbers of a weight that are widened at a time


class QuantizedPanels:
    """A weight [N, K] in the kernel's panels, as `kernels.cpu.quantized` describes them."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self.bits: Bits = weight.bits
        self.shape = weight.shape
        self.groups = weight.scales.shape[1]
        self._size = _UNIT if weight.group > _UNIT // 2 else _UNIT // 2
        self.steps, self.units = self._size // STEP, -(-weight.group // self._size)
        self.count = -(-self.shape[0] // WIDTH)
        zero, offsets = _zero_of(weight)
        self.zero = zero + (128 if self.bits == 8 else 0)
        factors = [weight.scales.float()] if offsets is None else [weight.scales.float(), offsets]
        self.half = HAS_HALF and all(one.to(torch.float16).float().equal(one) for one in factors)
        self._factor = torch.float16 if self.half else torch.float32
        line = WIDTH * self._factor.itemsize
        self.offset = 0 if offsets is None else line
        self.head = line * len(factors)
        self.group_bytes = self.head + self.units * self._size * WIDTH * self.bits // 8
        self.held = torch.empty(self.count, self.groups, self.group_bytes, dtype=torch.uint8)
        for panel in range(self.count):
            rows = slice(panel * WIDTH, (panel + 1) * WIDTH)
            for i, one in enumerate(factors):
                packed = _padded(one[rows], WIDTH).to(self._factor).T.contiguous().view(torch.uint8)
                self.held[panel, :, i * line : (i + 1) * line] = packed
            self.held[panel, :, self.head :] = self._pack(weight.codes[rows])
        self.record = QuantizedArguments(
            panels=self.held.data_ptr(),
            count=self.count,
            stride=self.groups * self.group_bytes,
            bits=self.bits,
            groups=self.groups,
            units=self.units,
            steps=self.steps,
            group_bytes=self.group_bytes,
            head=self.head,
            half=self.half,
            offset=self.offset,
            zero=self.zero,
        )

    @property
    def reads(self) -> tuple[int, ...]:
        """Returns what says which form rows of inputs take for it, if all of a model round them or none."""
        return self.groups, self.units, self.steps, self.zero

    @property
    def depth(self) -> int:
        """Returns the number of inputs, with the zeros that fill the last unit."""
        return self.groups * self.units * self._size

    def dequantized(self, first: int = 0, count: int | None = None) -> Tensor:
        """Returns what `count` panels stand for, float32 [outputs, K]; all the others if None."""
        held = self.held[first:] if count is None else self.held[first : first + count]
        factors = held[..., : self.head].contiguous().view(self._factor).float()
        factors = factors.view(len(held), self.groups, -1, WIDTH)  # panel, group, scale or offset, output
        numbers = self._unpack(held[..., self.head :]).float() - self.zero
        numbers *= factors[:, :, 0, :, None]
        if self.offset:
            numbers += factors[:, :, 1, :, None]
        inputs = self.shape[1] // self.groups
        whole = numbers[..., :inputs].transpose(1, 2).reshape(len(held) * WIDTH, -1)
        return whole[: self.shape[0] - first * WIDTH]

    def rows(self, ids: Tensor) -> Tensor:
        """Returns what the outputs `ids` [N] stand for, float32 [N, K]."""
        panel, output = ids // WIDTH, ids % WIDTH
        packed = self.held[..., self.head :].view(self.count, self.groups, -1, WIDTH, STEP)
        codes = packed[panel, :, :, output]
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=3)
        numbers = codes.flatten(2)[..., : self.shape[1] // self.groups].float() - self.zero
        factors = self.held[panel, :, : self.head].view(self._factor).view(len(ids), self.groups, -1, WIDTH)
        factors = factors[torch.arange(len(ids)), :, :, output].float()  # id, group, scale or offset
        numbers *= factors[..., 0, None]
        if self.offset:
            numbers += factors[..., 1, None]
        return numbers.flatten(1)

    def multiply(self, x: Tensor, out: Tensor, to: int, bias: int) -> None:
        """Stores x [rows, K] · weightᵀ + bias into rows of `out`, whose first has the address `to`. bias: its
        address, 0 for none; it has room for whole panels, as rows from `to` on have."""
        rows, columns = x.shape
        if self.depth != columns:  # one group, with less than a whole unit at its end
            x = functional.pad(x, (0, self.depth - columns))
        ready_row = ready_bytes(self.record)
        ready = torch.empty(rows * ready_row, dtype=torch.uint8)  # which torch aligns with lines
        call = ProductArguments(weight=ctypes.addressof(self.record), bias=bias, rows=rows)
        call.x, call.x_row = x.data_ptr(), x.stride(0) * _FLOAT
        call.to, call.to_row = to, out.stride(0) * _FLOAT
        call.ready, call.ready_row = ready.data_ptr(), ready_row
        multiply_quantized(call, torch.get_num_threads())

    def _pack(self, codes: Tensor) -> Tensor:
        """Returns a panel's codes as its groups hold them, from rows [at most 32, K] of a weight's."""
        codes = to_halves(codes) if self.bits == 4 else codes.view(torch.uint8) ^ 128
        inputs = self.units * self._size
        codes = functional.pad(
            codes.view(len(codes), self.groups, -1), (0, inputs - codes.shape[1] // self.groups)
        )
        codes = _padded(codes, WIDTH).view(WIDTH, self.groups, -1, STEP)  # output, group, step, input
        steps = codes.permute(1, 2, 0, 3)
        if self.bits == 4:
            steps = steps[:, ::2] | steps[:, 1::2] << 4
        return steps.flatten(1)

    def _unpack(self, packed: Tensor) -> Tensor:
        """Returns codes, uint8 [panel, group, output, input], of groups' bytes."""
        steps = packed.reshape(*packed.shape[:-1], -1, WIDTH, STEP)
        if self.bits == 4:
            steps = torch.stack((steps & 15, steps >> 4), dim=3).flatten(2, 3)
        return steps.transpose(2, 3).flatten(3)


def _padded(rows: Tensor, count: int) -> Tensor:
    """Returns `count` rows, of which the last are zeros."""
    return (
        rows if len(rows) == count else torch.cat((rows, rows.new_zeros(count - len(rows), *rows.shape[1:])))
    )


def _zero_of(weight: QuantizedWeight) -> tuple[int, Tensor | None]:
    """Returns the code that stands for zero and no offsets, if one code does in all groups; else 0 and the
    offsets."""
    if weight.offsets is None:
        return 0, None
    scales, offsets = weight.scales.float(), weight.offsets.float()
    some = scales.abs().argmax()
    scale = float(scales.flatten()[some])
    zero = round(-float(offsets.flatten()[some]) / scale) if scale else 0
    return (zero, None) if abs(zero) < 256 and offsets.equal(scales * -zero) else (0, offsets)


class ReadyRows:
    """Lays out what a stage of the one-kernel step makes of each row of its inputs before it multiplies:
    codes of 8 bits, or bfloat16, for each form that its weights read."""

    def __init__(self) -> None:
        self._places = dict[tuple[int, ...], int]()
        self._parts = list[ReadyArguments]()
        self.size = 0
        """Bytes."""

    def place(self, panels: QuantizedPanels) -> int:
        """Returns at which byte of a row lies what these panels read: weights of one form read the same."""
        at = self._places.setdefault(panels.reads, self.size)
        if at == self.size:
            self._parts.append(ReadyArguments(ctypes.addressof(panels.record), at))
            self.size += ready_bytes(panels.record)
        return at

    def place_rounded(self, panels: HalfPanels) -> int:
        """Returns at which byte of a row its bfloat16 lie, if these panels round their inputs."""
        at = self._places.setdefault((), self.size)
        if at == self.size:
            self._parts.append(ReadyArguments(0, at, panels.rounds_at, panels.depth))
            self.size += -(-panels.depth * 2 // _LINE) * _LINE
        return at

    def parts(self) -> ctypes.Array[ReadyArguments]:
        """Returns them as the kernel takes them."""
        return (ReadyArguments * len(self._parts))(*self._parts)


class PackedQuantizedLinear(nn.Module):
    """Computes x [..., K] · weight [N, K]ᵀ + bias [N], of which several weights may be a part each.

    With `exact`, products are those of float32 inputs. Without, inputs are rounded to 8 bits first, with a
    scale for each unit of a row, and products are sums of integers: quicker, and a row's result is the same
    bits whatever rows are beside it.
    """

    def __init__(self, weights: Sequence[QuantizedWeight], bias: Tensor | None, exact: bool = True) -> None:
        """weights: of which each has the next outputs."""
        super().__init__()
        self.out_features, self.in_features = sum(one.shape[0] for one in weights), weights[0].shape[1]
        self.panels = [QuantizedPanels(weight) for weight in _joined(weights)]
        self.exact = exact
        self.bias = None if bias is None else nn.Parameter(bias.detach().float(), requires_grad=False)
        self._width = self.out_features + -self.panels[-1].shape[0] % WIDTH
        self._wide_bias: Tensor | None = None
        if bias is not None:
            self._wide_bias = functional.pad(bias.detach().float(), (0, self._width - self.out_features))

    @property
    def exact(self) -> bool:
        return any(one.record.exact for one in self.panels)

    @exact.setter
    def exact(self, exact: bool) -> None:
        for one in self.panels:
            one.record.exact = exact

    def items(self, ready: ReadyRows) -> ctypes.Array[ItemArguments] | None:
        """Returns the work of the one-kernel step, 64 outputs after 64; it holds addresses of these panels.
        Returns None if a weight's last outputs and the next one's first would be in one item, or if inputs
        want zeros behind them. ready: of the stage."""
        whole = all(one.shape[0] % (2 * WIDTH) == 0 for one in self.panels[:-1])
        if not whole or any(one.depth != self.in_features for one in self.panels):
            return None
        items = [
            ItemArguments(
                ctypes.addressof(one.record),
                one.record.panels + first * one.record.stride,
                min(2, one.count - first),
                ready.place(one),
            )
            for one in self.panels
            for first in range(0, one.count, 2)
        ]
        return (ItemArguments * len(items))(*items)

    @classmethod
    def of(cls, linears: Sequence[QuantizedLinear]) -> Self:
        """Returns the product of the layers, side by side."""
        biases = [one.bias for one in linears]
        bias = None
        if any(one is not None for one in biases):
            zeros = [torch.zeros(one.out_features) for one in linears]
            bias = torch.cat([b if b is not None else zero for b, zero in zip(biases, zeros, strict=True)])
        return cls([one.quantized for one in linears], bias)

    def dequantized(self) -> Tensor:
        """Returns what the weights stand for, float32 [N, K]."""
        return torch.cat([one.dequantized() for one in self.panels])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).float().contiguous()
        widen = self.exact and len(rows) > _WIDEN_ROWS
        out = self._widened(rows) if widen else self._multiplied(rows)
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def activated(self, x: Tensor, activation: str, form: str = "") -> Tensor:
        """Returns activation(x · weightᵀ + bias). activation, form: oneDNN's names."""
        out = self(x)
        return functional.silu(out) if activation == "swish" else functional.gelu(out, approximate=form)

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """Returns (x · weightᵀ + bias) ∘ factor."""
        out: Tensor = self(x)
        return out.mul_(factor)

    def onto(self, x: Tensor, base: Tensor) -> Tensor:
        """Returns base + x · weightᵀ + bias."""
        out: Tensor = self(x)
        return out.add_(base)

    def _multiplied(self, x: Tensor) -> Tensor:
        out, first = torch.empty(len(x), self._width), 0
        for panels in self.panels:  # in order: what one writes past its outputs the next one writes over
            place = first * _FLOAT
            bias = 0 if self._wide_bias is None else self._wide_bias.data_ptr() + place
            panels.multiply(x, out, out.data_ptr() + place, bias)
            first += panels.shape[0]
        return out[:, : self.out_features].contiguous()

    def _widened(self, x: Tensor) -> Tensor:
        """Multiplies with float32 weights, a few panels at a time."""
        out, start = torch.empty(len(x), self.out_features), 0
        count = max(1, _WIDEN_NUMBERS // (WIDTH * self.in_features))
        for panels in self.panels:
            for first in range(0, panels.count, count):
                weight = panels.dequantized(first, count)
                torch.mm(x, weight.T, out=out[:, start : start + len(weight)])
                start += len(weight)
        return out if self.bias is None else out.add_(self.bias)


class QuantizedEmbedding(nn.Module):
    """Returns rows of a weight [V, K] out of the panels that a tied head has."""

    def __init__(self, panels: QuantizedPanels, dtype: torch.dtype) -> None:
        super().__init__()
        self._panels = panels
        self._dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        rows = self._panels.rows(ids.flatten()).to(self._dtype)
        return rows.view(*ids.shape, -1)


def _joined(weights: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """Returns the weights, neighbours of one form as one."""

    def form(one: QuantizedWeight) -> tuple[int, int, bool]:
        return one.bits, one.group, one.offsets is None

    made = []
    for _, alike in groupby(weights, form):
        same = list(alike)
        offsets = [one.offsets for one in same if one.offsets is not None]
        made.append(
            same[0]
            if len(same) == 1
            else QuantizedWeight(
                same[0].bits,
                torch.cat([one.codes for one in same]),
                torch.cat([one.scales for one in same]),
                torch.cat(offsets) if offsets else None,
            )
        )
    return made


def pack_quantized(model: nn.Module) -> None:
    """Packs a model's quantised layers in place, one after the other; their codes are let go."""
    for parent, name, child in children(model):
        if type(child) is QuantizedLinear:
            setattr(parent, name, PackedQuantizedLinear.of([child]))
