"""Reads the numbers of a GGUF file's tensors: blocks become codes, scales and offsets.

The blocks' layouts are those of https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, and what they
stand for is what https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c makes of them, computed in
float32 in the same order: the results are equal to the last bit, but that a zero may have the other sign.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvloom.exec.gguf.header import TensorRecord
from kvloom.exec.mapped import own_pages
from kvloom.exec.quantized import (
    Bits,
    Factors,
    Multiples,
    QuantizedWeight,
    from_halves,
    joined,
    narrowed,
)
from kvloom.types.errors import ConfigError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_CHUNK: Final = 1 << 18  # numbers that are converted at once


@dataclass(frozen=True, slots=True)
class _Factors:
    """Holds the scales or the offsets of blocks."""

    factors: Floats
    """[blocks, 1], the numbers that a file has in float16."""
    numbers: Bytes | None = None
    """If a block has more than one group, the integers that its factor is multiplied by [blocks, G]."""

    def of_rows(self, rows: int) -> Factors:
        """Returns the factors in the shape of so many rows."""
        factors = torch.from_numpy(self.factors.reshape(rows, -1))
        if self.numbers is None:
            return factors
        numbers = torch.from_numpy(self.numbers.copy()).view(torch.int8)
        return Multiples(numbers.view(rows, -1), factors.half())


@dataclass(frozen=True, slots=True)
class _Groups:
    """Holds what is in blocks. B is the number of a block's numbers."""

    codes: NDArray[Any]
    """uint8 from 0 to 15 or int8 [blocks, B]."""
    scales: _Factors
    offsets: _Factors | None = None


@dataclass(frozen=True, slots=True)
class _Layout:
    """A type of blocks, and how they become the one form of quantised weights."""

    bits: Bits
    group: int
    offsets: bool
    unpack: Callable[[Bytes], _Groups]
    """Takes blocks as bytes [blocks, size]."""


def _halves(blocks: Bytes, at: int) -> Floats:
    """Returns the float16 at byte `at` of each block, float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """Returns numbers from 0 to 15: each run of bytes holds `run` numbers in its low halves, and then as many
    in its high ones."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return np.concatenate((runs & 15, runs >> 4), axis=2).reshape(len(packed), -1)


def _fifth_bits(bits: Bytes) -> Bytes:
    """Returns 0 or 16 for each of 32 numbers, of which the first is in the lowest bit of the first byte."""
    return np.unpackbits(bits, axis=1, bitorder="little") << np.uint8(4)


def _q8_0(blocks: Bytes) -> _Groups:
    return _Groups(blocks[:, 2:].view(np.int8), _Factors(_halves(blocks, 0)))


def _q4_0(blocks: Bytes) -> _Groups:
    scales = _halves(blocks, 0)
    return _Groups(_nibbles(blocks[:, 2:], 16), _Factors(scales), _Factors(-8 * scales))


def _q4_1(blocks: Bytes) -> _Groups:
    return _Groups(_nibbles(blocks[:, 4:], 16), _Factors(_halves(blocks, 0)), _Factors(_halves(blocks, 2)))


def _q5_0(blocks: Bytes) -> _Groups:
    codes = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return _Groups(codes.astype(np.int8) - np.int8(16), _Factors(_halves(blocks, 0)))


def _q5_1(blocks: Bytes) -> _Groups:
    codes = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return _Groups(codes.astype(np.int8), _Factors(_halves(blocks, 0)), _Factors(_halves(blocks, 2)))


def _sixes(blocks: Bytes) -> tuple[_Factors, _Factors]:
    """Returns the scales and the offsets of eight groups, whose integers have 6 bits. The first four of each
    lie in the low bits of 4 bytes. Of the last four, the low halves lie in 4 more bytes, and the high bits
    above those of the first."""
    scales, minima, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    return (
        _Factors(_halves(blocks, 0), np.concatenate((scales & 63, low & 15 | scales >> 2 & 48), axis=1)),
        _Factors(-_halves(blocks, 2), np.concatenate((minima & 63, low >> 4 | minima >> 2 & 48), axis=1)),
    )


def _q4_k(blocks: Bytes) -> _Groups:
    return _Groups(_nibbles(blocks[:, 16:], 32), *_sixes(blocks))


def _q5_k(blocks: Bytes) -> _Groups:
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # group g's are in the bits g
    codes = _nibbles(blocks[:, 48:], 32) | fifth.reshape(len(blocks), -1) << 4
    return _Groups(codes.astype(np.int8), *_sixes(blocks))


def _q6_k(blocks: Bytes) -> _Groups:
    low = _nibbles(blocks[:, :128], 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    codes = (low | high.reshape(len(blocks), -1) << 4).astype(np.int8) - np.int8(32)
    return _Groups(codes, _Factors(_halves(blocks, 208), blocks[:, 192:208]))


_LAYOUTS: Final[Mapping[str, _Layout]] = {
    "Q8_0": _Layout(8, 32, False, _q8_0),
    "Q4_0": _Layout(4, 32, True, _q4_0),
    "Q4_1": _Layout(4, 32, True, _q4_1),
    "Q5_0": _Layout(8, 32, False, _q5_0),
    "Q5_1": _Layout(8, 32, True, _q5_1),
    "Q4_K": _Layout(4, 32, True, _q4_k),
    "Q5_K": _Layout(8, 32, True, _q5_k),
    "Q6_K": _Layout(8, 16, False, _q6_k),
}


def held_bytes(record: TensorRecord) -> int:
    """Returns the bytes that a quantised matrix takes as a `QuantizedWeight`. Numbers in float16 stay so, and
    a block's integers are bytes."""
    layout, block = _LAYOUTS[record.type.name], record.type.block
    numbers = 0 if block == layout.group else record.elements // layout.group
    factors = 2 * record.elements // block
    return record.elements * layout.bits // 8 + (numbers + factors) * (1 + layout.offsets)


def _read_rows(opened: BinaryIO, record: TensorRecord) -> Iterator[tuple[slice, Bytes]]:
    """Yields the tensor's rows, some at a time, as bytes [rows, bytes of a row]. Raises ConfigError if the
    file has become shorter."""
    rows = record.elements // record.shape[-1]
    step = max(1, _CHUNK // record.shape[-1])
    opened.seek(record.offset)
    for begin in range(0, rows, step):
        count = min(step, rows - begin)
        read = opened.read(count * record.row_bytes)
        if len(read) < count * record.row_bytes:
            raise ConfigError(f"{record.name} cannot be read: its file has become shorter")
        yield slice(begin, begin + count), np.frombuffer(read, np.uint8).reshape(count, record.row_bytes)


def _weight_of(rows: Bytes, record: TensorRecord) -> QuantizedWeight:
    """Returns the codes, scales and offsets of rows of a matrix. Raises ConfigError."""
    layout = _LAYOUTS[record.type.name]
    with np.errstate(invalid="ignore", over="ignore"):  # of scales that are refused below
        groups = layout.unpack(rows.reshape(-1, record.type.size))

    def whole(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values.reshape(len(rows), -1)))

    codes = whole(groups.codes)
    try:
        return QuantizedWeight(
            layout.bits,
            from_halves(codes) if layout.bits == 4 else codes,
            groups.scales.of_rows(len(rows)),
            None if groups.offsets is None else groups.offsets.of_rows(len(rows)),
        )
    except ConfigError as error:
        raise ConfigError(f"{record.name}: {error.message}") from error


def read_quantized(
    opened: BinaryIO, record: TensorRecord, order: NDArray[np.int64] | None = None
) -> QuantizedWeight:
    """Returns a quantised matrix. order: the place of each row in the file. Raises ConfigError if a scale is
    infinite."""
    layout = _LAYOUTS[record.type.name]
    rows, columns = record.shape
    size = rows * columns * layout.bits // 8
    codes = own_pages(size).view(rows, -1)
    codes = codes.view(torch.int8) if layout.bits == 8 else codes
    scales, offsets = list[Factors](), list[Factors]()
    places = None if order is None else torch.from_numpy(np.argsort(order))
    for span, read in _read_rows(opened, record):
        part = _weight_of(read, record)
        codes[span if places is None else places[span]] = part.codes
        scales.append(part.scales)
        if part.offsets is not None:
            offsets.append(part.offsets)

    def whole(parts: list[Factors]) -> Factors:
        values = joined(parts)
        values = values if order is None else values[torch.from_numpy(order)]
        return narrowed(values) if isinstance(values, Tensor) else values

    return QuantizedWeight(layout.bits, codes, whole(scales), whole(offsets) if offsets else None)


_FORMATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def format_of(record: TensorRecord) -> torch.dtype:
    """Returns the number format of a tensor that is not quantised."""
    return _FORMATS[record.type.name]


def read_plain(
    opened: BinaryIO, record: TensorRecord, dtype: torch.dtype, order: NDArray[np.int64] | None = None
) -> Tensor:
    """Returns a tensor in `dtype`, whatever its type in the file. order: as `read_quantized` has it."""
    made = own_pages(record.elements * dtype.itemsize).view(dtype).view(-1, record.shape[-1])
    for span, read in _read_rows(opened, record):
        if record.quantized:
            made[span] = _weight_of(read, record).dequantized()
        else:
            made[span] = torch.from_numpy(read.copy()).view(format_of(record))
    made = made.view(record.shape)
    return made if order is None else made[torch.from_numpy(order)]


class MappedEmbedding(nn.Module):
    """Looks up rows of a quantised matrix that stays in the mapped file, so that only the pages of tokens
    that come are in memory, once for all engines of a host."""

    def __init__(self, record: TensorRecord, rows: Bytes, dtype: torch.dtype) -> None:
        """rows: the matrix as bytes [V, bytes of a row]."""
        super().__init__()
        self._record = record
        self._rows = rows
        self.dtype = dtype

    def forward(self, tokens: Tensor) -> Tensor:
        """Takes tokens [...] and returns their rows [..., K]."""
        asked, places = np.unique(tokens.reshape(-1).numpy(), return_inverse=True)
        found = _weight_of(self._rows[asked], self._record).dequantized().to(self.dtype)
        return found[torch.from_numpy(places)].view(*tokens.shape, -1)

    def read(self) -> Tensor:
        """Returns all rows [V, K]."""
        step = max(1, _CHUNK // self._record.shape[-1])
        parts = (self._rows[begin : begin + step] for begin in range(0, len(self._rows), step))
        return torch.cat([_weight_of(part, self._record).dequantized().to(self.dtype) for part in parts])


def map_embedding(opened: BinaryIO, record: TensorRecord, dtype: torch.dtype) -> MappedEmbedding:
    """Returns the matrix as an embedding. Raises ConfigError if a scale is infinite."""
    for _, rows in _read_rows(opened, record):
        _weight_of(rows, record)
    shape = (record.shape[0], record.row_bytes)
    mapped = np.memmap(opened, np.uint8, "r", record.offset, shape)
    return MappedEmbedding(record, mapped, dtype)
