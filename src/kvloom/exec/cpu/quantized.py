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
from kvloom.exec.quantized import (
    Factors,
    Multiples,
    QuantizedLinear,
    QuantizedWeight,
    joined,
    to_halves,
)
from kvloom.kernels.cpu.half import HalfPanels
from kvloom.kernels.cpu.lanes.floats import HAS_HALF
from kvloom.kernels.cpu.products import ItemArguments, ReadyArguments
from kvloom.kernels.cpu.quantized.lookup import LookupArguments, look_up
from kvloom.kernels.cpu.quantized.panels import WIDTH, ProductArguments, multiply_quantized
from kvloom.kernels.cpu.quantized.rows import (
    FACTOR16,
    FACTOR32,
    MULTIPLES,
    STEP,
    QuantizedArguments,
    ready_bytes,
)

_FLOAT: Final = 4  # bytes
_LINE: Final = 64  # bytes
_UNIT: Final = 32  # inputs that are rounded with one scale
_RAISED: Final = {4: 0, 6: 32, 8: 128}  # what is added to codes, so that they are unsigned
_WIDEN_ROWS: Final = 96  # more rows of float32 are faster by torch's products over widened weights
_WIDEN_NUMBERS: Final = 1 << 20  # numbers of a weight that are widened at a time


class QuantizedPanels:
    """A weight [N, K] in the kernel's panels, as `kernels/cpu/quantized/panels.py` describes them."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self.bits = _held_bits(weight)
        self.shape = weight.shape
        self.groups = weight.scales.shape[1]
        self._size = _UNIT if weight.group > _UNIT // 2 else _UNIT // 2
        self.steps, self.units = self._size // STEP, -(-weight.group // self._size)
        self.count = -(-self.shape[0] // WIDTH)
        zero, offsets = _zero_of(weight)
        self.zero = zero + _RAISED[self.bits]
        factors = [weight.scales] if offsets is None else [weight.scales, offsets]
        self.form, self._factor, self._block = _form_of(factors)
        line = WIDTH * self._factor.itemsize + (self._block * WIDTH if self.form == MULTIPLES else 0)
        self.offset = 0 if offsets is None else line
        self.head = line * len(factors)
        group_bytes = self.units * self._size * WIDTH * self.bits // 8
        block_bytes, blocks = self.head + self._block * group_bytes, self.groups // self._block
        self.held = torch.empty(self.count, blocks, block_bytes, dtype=torch.uint8)
        for panel in range(self.count):
            rows = slice(panel * WIDTH, (panel + 1) * WIDTH)
            for i, one in enumerate(factors):
                self.held[panel, :, i * line : (i + 1) * line] = self._pack_factors(one[rows])
            self.held[panel, :, self.head :] = self._pack(weight.codes[rows]).reshape(blocks, -1)
        self.record = QuantizedArguments(
            panels=self.held.data_ptr(),
            count=self.count,
            stride=blocks * block_bytes,
            bits=self.bits,
            groups=self.groups,
            units=self.units,
            steps=self.steps,
            shift=self._block.bit_length() - 1,
            block_bytes=block_bytes,
            head=self.head,
            group_bytes=group_bytes,
            form=self.form,
            offset=self.offset,
            zero=self.zero,
        )

    @property
    def reads(self) -> tuple[int, ...]:
        """Returns the key of the form that rows of inputs take for these panels, given that all products of a
        model round inputs, or none does."""
        return self.groups, self.units, self.steps, self.zero

    @property
    def depth(self) -> int:
        """Returns the number of inputs, with the zeros that fill the last unit."""
        return self.groups * self.units * self._size

    def dequantized(self, first: int = 0, count: int | None = None) -> Tensor:
        """Returns the numbers that `count` panels stand for, float32 [outputs, K]; with None those of all the
        panels that follow."""
        held = self.held[first:] if count is None else self.held[first : first + count]
        line = self.offset or self.head
        codes = held[..., self.head :].reshape(len(held), self.groups, -1)
        numbers = self._unpack(codes).float() - self.zero
        numbers *= self._unpack_factors(held[..., :line])[..., None]
        if self.offset:
            numbers += self._unpack_factors(held[..., line : self.head])[..., None]
        inputs = self.shape[1] // self.groups
        whole = numbers[..., :inputs].transpose(1, 2).reshape(len(held) * WIDTH, -1)
        return whole[: self.shape[0] - first * WIDTH]

    def rows(self, ids: Tensor) -> Tensor:
        """Returns the numbers of the outputs `ids` [N], float32 [N, K]."""
        wanted, found = ids.to(torch.int32), torch.empty(len(ids), self.shape[1])
        call = LookupArguments(weight=ctypes.addressof(self.record), ids=wanted.data_ptr(), rows=len(ids))
        call.to, call.to_row = found.data_ptr(), self.shape[1] * _FLOAT
        look_up(call, torch.get_num_threads())
        return found

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

    def _pack_factors(self, some: Factors) -> Tensor:
        """Returns a panel's scales or offsets as its blocks hold them, of [at most 32, G]."""
        shared = some.factors if self.form == MULTIPLES and isinstance(some, Multiples) else some.float()
        parts = [_padded(shared, WIDTH).to(self._factor).T.contiguous().view(torch.uint8)]
        if self.form == MULTIPLES and isinstance(some, Multiples):
            numbers = _padded(some.numbers, WIDTH).T.contiguous().view(torch.uint8)
            parts.append(numbers.view(-1, self._block * WIDTH))
        return torch.cat(parts, dim=1)

    def _unpack_factors(self, packed: Tensor) -> Tensor:
        """Returns scales or offsets, float32 [panel, group, output], of blocks' bytes."""
        size = WIDTH * self._factor.itemsize
        shared = packed[..., :size].contiguous().view(self._factor).float()
        if self.form == MULTIPLES:
            numbers = packed[..., size:].contiguous().view(torch.int8).float()
            shared = numbers.view(*packed.shape[:2], -1, WIDTH).mul_(shared[:, :, None]).flatten(1, 2)
        return shared

    def _pack(self, codes: Tensor) -> Tensor:
        """Returns a panel's codes as its groups hold them, from rows [at most 32, K] of a weight's."""
        codes = to_halves(codes) if self.bits == 4 else codes.view(torch.uint8) + _RAISED[self.bits]
        inputs = self.units * self._size
        codes = functional.pad(
            codes.view(len(codes), self.groups, -1), (0, inputs - codes.shape[1] // self.groups)
        )
        codes = _padded(codes, WIDTH).view(WIDTH, self.groups, -1, STEP)  # output, group, step, input
        steps = codes.permute(1, 2, 0, 3)
        if self.bits == 4:
            steps = steps[:, ::2] | steps[:, 1::2] << 4
        elif self.bits == 6:
            steps = steps.reshape(self.groups, -1, 4, WIDTH, STEP)
            pairs = [steps[:, :, 3] << shift & 0xC0 for shift in (2, 4, 6)]
            steps = (steps[:, :, :3] | torch.stack(pairs, 2)).flatten(1, 2)
        return steps.flatten(1)

    def _unpack(self, packed: Tensor) -> Tensor:
        """Returns codes, uint8 [panel, group, output, input], of groups' bytes."""
        steps = packed.reshape(*packed.shape[:-1], -1, WIDTH, STEP)
        if self.bits == 4:
            steps = torch.stack((steps & 15, steps >> 4), dim=3).flatten(2, 3)
        elif self.bits == 6:
            steps = steps.view(*steps.shape[:2], -1, 3, WIDTH, STEP)
            pairs = [steps[:, :, :, i] >> 6 << shift for i, shift in enumerate((4, 2, 0))]
            fourth = (pairs[0] | pairs[1] | pairs[2])[:, :, :, None]
            steps = torch.cat((steps & 63, fourth), dim=3).flatten(2, 3)
        return steps.transpose(2, 3).flatten(3)


def _padded(rows: Tensor, count: int) -> Tensor:
    """Returns `count` rows, of which the last are zeros."""
    return (
        rows if len(rows) == count else torch.cat((rows, rows.new_zeros(count - len(rows), *rows.shape[1:])))
    )


def _held_bits(weight: QuantizedWeight) -> int:
    """Returns 6 if codes of 8 bits are from -32 to 31, as those of Q6_K and of Q5_K are."""
    if weight.bits == 8 and int(weight.codes.min()) >= -32 and int(weight.codes.max()) < 32:
        return 6
    return weight.bits


def _form_of(factors: Sequence[Factors]) -> tuple[int, torch.dtype, int]:
    """Returns the form in which panels hold scales and offsets, its number format, and how many groups are a
    block."""
    runs = [one.run for one in factors if isinstance(one, Multiples)]
    if HAS_HALF and runs:
        return MULTIPLES, torch.float16, runs[0]
    if HAS_HALF and all(one.float().to(torch.float16).float().equal(one.float()) for one in factors):
        return FACTOR16, torch.float16, 1
    return FACTOR32, torch.float32, 1


def _zero_of(weight: QuantizedWeight) -> tuple[int, Factors | None]:
    """Returns the code that stands for zero and no offsets, if one code does in all groups; else 0 and the
    offsets."""
    if weight.offsets is None:
        return 0, None
    scales, offsets = weight.scales.float(), weight.offsets.float()
    some = scales.abs().argmax()
    scale = float(scales.flatten()[some])
    zero = round(-float(offsets.flatten()[some]) / scale) if scale else 0
    return (zero, None) if abs(zero) < 256 and offsets.equal(scales * -zero) else (0, weight.offsets)


class ReadyRows:
    """Lays out the forms into which a stage of the one-kernel step brings each row of its inputs before it
    multiplies: codes of 8 bits, or bfloat16, for each form that its weights read."""

    def __init__(self) -> None:
        self._places = dict[tuple[int, ...], int]()
        self._parts = list[ReadyArguments]()
        self.size = 0
        """Bytes."""

    def place(self, panels: QuantizedPanels) -> int:
        """Returns the byte of a row from which these panels read: weights of one form read the same."""
        at = self._places.setdefault(panels.reads, self.size)
        if at == self.size:
            self._parts.append(ReadyArguments(ctypes.addressof(panels.record), at))
            self.size += ready_bytes(panels.record)
        return at

    def place_rounded(self, panels: HalfPanels) -> int:
        """Returns the byte of a row at which its bfloat16 begin, if these panels round their inputs."""
        at = self._places.setdefault((), self.size)
        if at == self.size:
            self._parts.append(ReadyArguments(0, at, panels.rounds_at, panels.depth))
            self.size += -(-panels.depth * 2 // _LINE) * _LINE
        return at

    def parts(self) -> ctypes.Array[ReadyArguments]:
        """Returns the forms as the kernel takes them."""
        return (ReadyArguments * len(self._parts))(*self._parts)


class PackedQuantizedLinear(nn.Module):
    """Computes x [..., K] · weight [N, K]ᵀ + bias [N], of which several weights may be a part each.

    With `exact`, products are those of float32 inputs. Without, inputs are rounded to 8 bits first, with a
    scale for each unit of a row, and products are sums of integers: quicker, and a row's result is the same
    bits whatever rows are beside it.
    """

    def __init__(self, weights: Sequence[QuantizedWeight], bias: Tensor | None, exact: bool = True) -> None:
        """weights: each has the next outputs."""
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
        """Returns the numbers of the weights, float32 [N, K]."""
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
        self.panels = panels
        self._dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.panels.rows(ids.flatten()).to(self._dtype)
        return rows.view(*ids.shape, -1)


def _joined(weights: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """Returns the weights, neighbours of one form as one."""

    def form(one: QuantizedWeight) -> tuple[int, int, bool, bool]:
        return _held_bits(one), one.group, isinstance(one.scales, Multiples), one.offsets is None

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
                joined([one.scales for one in same]),
                joined(offsets) if offsets else None,
            )
        )
    return made


def pack_quantized(model: nn.Module) -> None:
    """Packs a model's quantised layers in place, one after the other; their codes are let go."""
    for parent, name, child in children(model):
        if type(child) is QuantizedLinear:
            setattr(parent, name, PackedQuantizedLinear.of([child]))
