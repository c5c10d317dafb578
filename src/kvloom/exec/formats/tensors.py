"""The tensors of quantised checkpoints: finds them in the files, unpacks their bits, and says what is wrong
with them.

All numbers are little-endian, as safetensors wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.exec.mapped import own_pages
from kvloom.exec.quantized import GROUPS, Bits, QuantizedWeight, narrowed, to_halves
from kvloom.types.errors import ConfigError

SCALES: Final = ("F16", "BF16", "F32")
WORD: Final = 32  # bits of the words into which codes are packed
KEY: Final = "quantization_config"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a mapped file."""

    name: str
    file: Path
    values: Any
    """The slice that safetensors has for it; nothing of it is read yet."""

    @property
    def shape(self) -> list[int]:
        return list(self.values.get_shape())

    @property
    def format(self) -> str:
        """Returns safetensors' name of its number format."""
        return str(self.values.get_dtype())

    def read(self) -> Tensor:
        """Returns its numbers, which lie in the mapped file."""
        numbers: Tensor = self.values[...]
        return numbers

    def error(self, reason: str) -> ConfigError:
        return ConfigError(f"its {self.file.name}: {self.name[:100]} {reason}")

    def require(self, shape: Sequence[int], *formats: str) -> None:
        """Raises ConfigError if it has another shape or number format."""
        self._require_format(*formats)
        if self.shape != list(shape):
            raise self.error(f"has shape {self.shape}; {list(shape)} is right")

    def matrix(self, number_format: str) -> tuple[int, int]:
        """Returns its shape. Raises ConfigError if it is empty, no matrix, or of another number format."""
        self._require_format(number_format)
        if len(self.shape) != 2 or not all(self.shape):
            raise self.error(f"has shape {self.shape}; two dimensions, and numbers, are right")
        return self.shape[0], self.shape[1]

    def _require_format(self, *formats: str) -> None:
        if self.format not in formats:
            raise self.error(f"has the number format {self.format}; {' or '.join(formats)} is right")


Parts = Mapping[str, StoredTensor]
"""The tensors of one linear layer, by their own names."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the weight [N, K] of one linear layer is stored."""

    shape: tuple[int, int]
    bits: Bits
    groups: int
    """Scales of a row."""
    offsets: bool
    """Whether it may have offsets."""
    read: Callable[[], QuantizedWeight]
    floats: bool = False
    """Whether its codes are floats of 8 bits (FP8)."""

    @property
    def nbytes(self) -> int:
        """Returns the most bytes that the result of `read` takes."""
        rows, columns = self.shape
        return rows * (columns * self.bits // 8 + self.groups * 4 * (1 + self.offsets))


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads one format, as a config says that it is."""

    names: frozenset[str]
    """The names of tensors by which a quantised layer is known."""
    layout: Callable[[Parts], Layout]
    """Returns how a layer's weight is stored. Raises ConfigError if it is not as the config says."""


def part_of(parts: Parts, name: str) -> StoredTensor:
    """Returns the tensor of this name. Raises ConfigError if the layer lacks it."""
    found = parts.get(name)
    if found is None:
        other = min(parts.values(), key=lambda tensor: tensor.name)
        module, _, part = other.name.rpartition(".")
        raise ConfigError(f"its {other.file.name}: {module[:100]} has {part} and lacks {name}")
    return found


def config_error(key: str, value: object, *right: object) -> ConfigError:
    """Returns the error which says that a value of the config is wrong. right: a value that would be
    right."""
    shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
    return ConfigError(f"its {KEY}: {key}: {shown}; {' or '.join(map(str, right))} is right")


def whole_number(config: Mapping[str, Any], keys: Sequence[str], default: int | None = None) -> int:
    """Returns the whole number under the first of the keys that is there."""
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise config_error(key, value, "a whole number")
    return value


def read_bits(
    config: Mapping[str, Any], keys: Sequence[str], *right: Bits, default: int | None = None
) -> Bits:
    """Returns the bits of a code. Raises ConfigError for others than are right."""
    found = whole_number(config, keys, default)
    for bits in right:
        if bits == found:
            return bits
    raise config_error(keys[0], found, *right)


def as_bytes(words: Tensor) -> Tensor:
    """Returns int32 [..., W] as uint8 [..., 4 W], the lowest byte of a word first."""
    return words.contiguous().view(torch.uint8)


def unpacked(words: Tensor, bits: Bits) -> Tensor:
    """Returns int32 [..., W] as uint8 [..., W · 32 / bits], the lowest bits of a word first."""
    return to_halves(as_bytes(words)) if bits == 4 else as_bytes(words)


def signed(numbers: Tensor) -> Tensor:
    """Returns numbers from 0 to 255 less 128, int8."""
    made = own_pages(numbers.numel()).view(numbers.shape)
    return torch.bitwise_xor(numbers, 128, out=made).view(torch.int8)


def made(bits: Bits, codes: Tensor, scales: Tensor, zeros: Tensor | int, of: StoredTensor) -> QuantizedWeight:
    """Returns the weight whose elements are scale · (code - zero). zeros: [N, G], or one for all. With scales
    of 16 bits all numbers on the way are exact in float32, and so are the elements."""
    wide = scales.to(torch.float32).contiguous()
    offsets = None
    if isinstance(zeros, Tensor) and bool(zeros.any()):
        offsets = -(wide * zeros)
    elif isinstance(zeros, int) and zeros:
        offsets = wide * -zeros
    try:
        return QuantizedWeight(
            bits, codes.contiguous(), narrowed(wide), None if offsets is None else narrowed(offsets)
        )
    except ConfigError as error:
        raise of.error(f"cannot be: {error.message}") from error


def groups_of(columns: int, group: int, of: StoredTensor) -> int:
    """Returns how many groups a row of `columns` numbers has; a `group` of -1 is a whole row."""
    if columns < 1 or columns % 2:
        raise of.error(f"stands for rows of {columns} numbers; an even number is right")
    if group in (-1, columns):
        return 1
    if columns % group or group not in GROUPS:
        raise of.error(
            f"stands for rows of {columns} numbers in groups of {group}; {', '.join(map(str, GROUPS))} that "
            "divide them, or whole rows, are right"
        )
    return columns // group


def group_size(config: Mapping[str, Any], keys: Sequence[str]) -> int:
    """Returns the length of a group, or -1 for a whole row."""
    group = whole_number(config, keys, 128)
    if group < 1 and group != -1:
        raise config_error(keys[0], group, -1, "a positive number")
    return group


def require_order(index: StoredTensor, columns: int, groups: int) -> None:
    """Raises ConfigError unless the groups of columns stand in the order of the columns. index: the group of
    each column."""
    index.require([columns], "I32", "I64")
    if not index.read().to(torch.int64).equal(torch.arange(columns) // (columns // groups)):
        raise index.error(
            "puts columns into groups by activation (act_order); a checkpoint that was made without is right"
        )
