"""Weights of 8 or 4 bits as checkpoints give them: how they are held and dequantised, and the plain form of a
product over them. `exec/cpu/quantized.py` packs them for kernels.

All formats of checkpoints come down to one: a matrix of integers, in which each group of neighbours in a row
has a scale and, in some formats, an offset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvloom.types.errors import ConfigError

Bits = Literal[4, 8]
GROUPS: Final = (16, 32, 64, 128)
"""The lengths that a group may have, but for a whole row."""
_NUMBERS_AT_ONCE: Final = 1 << 21  # of a weight that a plain product dequantises


def to_halves(packed: Tensor) -> Tensor:
    """Returns the nibbles of bytes [..., B], from 0 to 15, uint8 [..., 2 B]; a byte's low one first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def from_halves(numbers: Tensor) -> Tensor:
    """Returns numbers from 0 to 15, uint8 [N, K], as nibbles: bytes [N, K / 2] of two neighbours each."""
    return numbers[:, ::2] | numbers[:, 1::2] << 4


def narrowed(values: Tensor) -> Tensor:
    """Returns values of float32 in float16 if that holds all of them exactly, else as they are."""
    half = values.to(torch.float16)
    return half if half.float().equal(values) else values


@dataclass(frozen=True, slots=True)
class Multiples:
    """Scales or offsets [N, G] that are small integers times a factor that each run of neighbours shares."""

    numbers: Tensor
    """int8 [N, G]."""
    factors: Tensor
    """float16 [N, R]; each is the factor of G / R groups, which is a power of two."""

    def __getitem__(self, rows: slice | Tensor) -> Multiples:
        return Multiples(self.numbers[rows], self.factors[rows])

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def run(self) -> int:
        """Returns how many groups share a factor."""
        return self.numbers.shape[1] // self.factors.shape[1]

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.factors.nbytes

    def float(self) -> Tensor:
        """Returns their numbers, float32 [N, G]."""
        runs = self.numbers.float().view(*self.factors.shape, self.run)
        return runs.mul_(self.factors.float()[..., None]).flatten(1)


Factors = Tensor | Multiples
"""Scales or offsets [N, G]: float32, float16 if that holds them exactly, or integers with common factors."""


def joined(parts: Sequence[Factors]) -> Factors:
    """Returns the factors of several weights one below the other. All are of one form."""
    if len(parts) == 1:
        return parts[0]
    multiples = [one for one in parts if isinstance(one, Multiples)]
    if not multiples:
        return torch.cat([one.float() for one in parts])
    return Multiples(
        torch.cat([one.numbers for one in multiples]), torch.cat([one.factors for one in multiples])
    )


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix [N, K] of which the element at (n, k) is scales[n, g] · codes[n, k] + offsets[n, g], where the
    group g is k // (K / G)."""

    bits: Bits
    codes: Tensor
    """With 8 bits, int8 [N, K], or float8_e4m3fn (FP8), which GPUs multiply. With 4 bits, numbers from 0 to
    15 as `from_halves` makes bytes of them, uint8 [N, K / 2]."""
    scales: Factors
    offsets: Factors | None = None
    """Offsets; None stands for zeros."""

    def __post_init__(self) -> None:
        rows, columns = self.shape
        groups = self.scales.shape[-1]
        fits = groups and columns % groups == 0 and (groups == 1 or columns // groups in GROUPS)
        if self.scales.shape != (rows, groups) or not fits:
            raise ConfigError(
                f"scales of shape {list(self.scales.shape)} for {rows} × {columns} numbers; groups of "
                f"{', '.join(map(str, GROUPS))} or a whole row are right"
            )
        for values in (self.scales, self.offsets):
            checked = values.factors if isinstance(values, Multiples) else values
            if checked is not None and not bool(checked.isfinite().all()):
                raise ConfigError("a scale or an offset is infinite or no number; finite ones are right")

    @property
    def shape(self) -> tuple[int, int]:
        """Returns N and K."""
        rows, width = self.codes.shape
        return rows, width * (8 // self.bits)

    @property
    def group(self) -> int:
        """Returns the length of a group."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, *(() if self.offsets is None else (self.offsets,)))
        return sum(part.nbytes for part in parts)

    def rows(self, some: slice) -> QuantizedWeight:
        """Returns some of its rows, which are not copied."""
        offsets = None if self.offsets is None else self.offsets[some]
        return QuantizedWeight(self.bits, self.codes[some], self.scales[some], offsets)

    def dequantized(self) -> Tensor:
        """Returns the matrix that it stands for, float32 [N, K]."""
        codes = to_halves(self.codes) if self.bits == 4 else self.codes
        groups = codes.to(torch.float32).view(*self.scales.shape, self.group)
        groups *= self.scales.float()[..., None]
        if self.offsets is not None:
            groups += self.offsets.float()[..., None]
        return groups.flatten(-2)


def quantized(weight: Tensor, bits: Bits, group: int) -> QuantizedWeight:
    """Returns the matrix [N, K] rounded to the nearest codes. With 8 bits a group's largest magnitude has the
    code ±127; with 4 bits its least value has the code 0 and its largest 15. Raises ConfigError if groups do
    not fit."""
    columns = weight.shape[1]
    if columns % group or (bits == 4 and columns % 2):
        raise ConfigError(f"rows of {columns} numbers in groups of {group}; a divisor is right")
    groups = weight.to(torch.float32).view(len(weight), -1, group)
    if bits == 8:
        scales = (groups.abs().amax(-1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        codes = (groups / scales[..., None]).round().to(torch.int8).flatten(-2)
        return QuantizedWeight(8, codes, scales)
    least, most = groups.amin(-1), groups.amax(-1)
    scales = ((most - least) / 15).clamp_min(torch.finfo(torch.float32).tiny)
    codes = ((groups - least[..., None]) / scales[..., None]).round().clamp(0, 15).to(torch.uint8).flatten(-2)
    return QuantizedWeight(4, from_halves(codes), scales, least)


class QuantizedLinear(nn.Module):
    """Computes x [..., K] · weight [N, K]ᵀ + bias [N] in the number format of x."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.quantized = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        rows = max(1, _NUMBERS_AT_ONCE // self.in_features)
        starts = range(0, self.out_features, rows)
        wide = (self.quantized.rows(slice(at, at + rows)).dequantized().to(x.dtype) for at in starts)
        out = torch.cat([functional.linear(x, part) for part in wide], -1)
        return out if self.bias is None else out + self.bias


def linear_of(module: nn.Module, name: str, shape: tuple[int, int]) -> nn.Linear:
    """Returns the linear layer of this name, as `model.layers.0.mlp.up_proj`. Raises ConfigError if there is
    none, or its weight has another shape: transformers would merge it with others, or leave it out."""
    try:
        linear = module.get_submodule(name)
    except AttributeError:
        linear = module
    if not isinstance(linear, nn.Linear):
        raise ConfigError(
            f"{name} is quantised, and is no linear layer of transformers' {type(module).__name__}; a "
            "checkpoint in which it is plain is right"
        )
    if tuple(linear.weight.shape) != shape:
        raise ConfigError(
            f"{name} has shape {list(shape)} in its files and {list(linear.weight.shape)} in its config"
        )
    return linear


def put_quantized(module: nn.Module, weights: Mapping[str, QuantizedWeight]) -> None:
    """Replaces linear modules in place. weights: by the module's name. Raises ConfigError if there is no such
    linear module, or it has another shape."""
    for name, weight in weights.items():
        linear = linear_of(module, name, weight.shape)
        module.set_submodule(name, QuantizedLinear(weight, linear.bias))
