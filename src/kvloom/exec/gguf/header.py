"""The header of a GGUF file, which a stranger may have made: its values, and the places of its tensors.

The file is not believed: each length is compared with the bytes that are there before anything is made of
it, and each tensor must lie inside the file, beside the others. The layout is that of versions 2 and 3 of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Nothing here knows torch, so that commands can use
it.
"""

from __future__ import annotations

import math
import mmap
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvloom.types.errors import ConfigError

SUFFIX: Final = ".gguf"

MOST_HEADER: Final = 64 << 20  # bytes of values and tensors' records; vocabularies take some 10 MB
MOST_VALUES: Final = 1 << 16
MOST_ENTRIES: Final = 1 << 22  # of an array
MOST_TENSORS: Final = 1 << 16
MOST_NAME: Final = 1 << 10  # bytes of a key or of a tensor's name
MOST_TEXT: Final = 8 << 20  # bytes of a text, such as a chat template
MOST_DIMENSIONS: Final = 4
MOST_ALIGNMENT: Final = 1 << 20

Value = int | float | str | Sequence[str] | Sequence[int] | Sequence[float]


@dataclass(frozen=True, slots=True)
class TensorType:
    """A number format of tensors: `size` bytes hold `block` numbers."""

    name: str
    block: int
    size: int


PLAIN: Final[Mapping[int, TensorType]] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    30: TensorType("BF16", 1, 2),
}
QUANTIZED: Final[Mapping[int, TensorType]] = {
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
}
SERVED: Final[Mapping[int, TensorType]] = {**PLAIN, **QUANTIZED}
OTHERS: Final[Mapping[int, str]] = {
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS"},
    **{19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32"},
    **{27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"},
}
"""Types that files have and that are not served, so that an error can name them."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Holds what the header says of a tensor."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    """The dimensions as torch has them: those of a matrix are its rows and the numbers of a row."""
    offset: int
    """Bytes from the beginning of the file."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements // self.type.block * self.type.size

    @property
    def quantized(self) -> bool:
        return self.type.block > 1

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of the numbers of the last dimension."""
        return self.shape[-1] // self.type.block * self.type.size

    def part(self, index: int) -> TensorRecord:
        """Returns the record of what lies at `index` of the first dimension."""
        size = self.nbytes // self.shape[0]
        return TensorRecord(f"{self.name}[{index}]", self.type, self.shape[1:], self.offset + index * size)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file, checked."""

    file: Path
    values: Mapping[str, Value]
    tensors: Mapping[str, TensorRecord]

    @property
    def architecture(self) -> str:
        return str(self.values["general.architecture"])

    @property
    def elements(self) -> int:
        """Returns how many numbers its tensors hold together."""
        return sum(tensor.elements for tensor in self.tensors.values())

    def text(self, key: str) -> str | None:
        """Returns the text at `key`, or None if there is none. Raises ConfigError if it is something else."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"its {key} is no text")
        return value

    def number(self, key: str) -> float | None:
        """Returns the number at `key`, or None if there is none. Raises ConfigError if it is no finite
        number."""
        value = self.values.get(key)
        if value is not None and (not isinstance(value, (int, float)) or not math.isfinite(value)):
            raise ConfigError(f"its {key} is not one finite number")
        return value

    def count(self, key: str) -> int | None:
        """Returns the whole number from 0 on at `key`, or None if there is none. Raises ConfigError if it is
        something else."""
        value = self.values.get(key)
        if value is not None and (not isinstance(value, int) or value < 0):
            raise ConfigError(f"its {key} is no whole number")
        return value

    def texts(self, key: str) -> Sequence[str] | None:
        """Returns the list of texts at `key`, or None if there is none. Raises ConfigError if it is something
        else."""
        value = self.values.get(key)
        if value is None or (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            return value
        raise ConfigError(f"its {key} is no list of texts")

    def numbers(self, key: str) -> Sequence[float] | None:
        """Returns the list of numbers at `key`, or None if there is none. Raises ConfigError if it is
        something else."""
        value = self.values.get(key)
        if value is None or isinstance(value, array):
            return value
        raise ConfigError(f"its {key} is no list of numbers")


def read_header(file: Path) -> GgufHeader:
    """Returns the header of the file. Raises ConfigError if it contradicts the file or itself, or if the file
    holds what is not served."""
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ConfigError(f"its {file.name} does not begin as a GGUF file does; another file is right")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _Reader(file, mapped).header()


_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS: Final[Mapping[int, str]] = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
}
"""The codes that `struct` and `array` have for the format's types of values; 7 is a Boolean."""
_TEXT, _ARRAY = 8, 9


class _Reader:
    """Goes through a header once."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self._file = file
        self._data = data
        self._at = 4
        self._end = min(len(data), MOST_HEADER)

    def header(self) -> GgufHeader:
        version = self._number(_U32)
        if version not in (2, 3):
            swapped = version & 0xFFFF == 0
            what = "is of a big-endian machine" if swapped else f"has version {version}"
            raise ConfigError(
                f"its {self._file.name} {what}; a little-endian file of version 2 or 3 is right"
            )
        tensors = self._count(MOST_TENSORS, "tensors")
        values: dict[str, Value] = {}
        for _ in range(self._count(MOST_VALUES, "values")):
            key = self._name()
            if key in values:
                raise ConfigError(f"its {self._file.name} has {key[:100]} twice")
            values[key] = self._value(key)
        self._check(values)
        records = [self._record() for _ in range(tensors)]
        return GgufHeader(self._file, values, self._placed(records, values))

    def _take(self, length: int) -> int:
        """Returns the position at which the next `length` bytes begin, and goes beyond them. Raises
        ConfigError if they are not there."""
        at = self._at
        if length > self._end - at:
            size = len(self._data)
            if size > self._end:
                raise ConfigError(
                    f"its {self._file.name} has too large a header; {MOST_HEADER:,} bytes at most are right"
                )
            raise ConfigError(
                f"its {self._file.name} is cut short: its header wants {length:,} bytes at {at:,}, and the "
                f"file has {size:,}; a whole file is right"
            )
        self._at = at + length
        return at

    def _number(self, form: struct.Struct) -> int:
        number: int = form.unpack_from(self._data, self._take(form.size))[0]
        return number

    def _count(self, most: int, what: str) -> int:
        count = self._number(_U64)
        if count > most:
            raise ConfigError(f"its {self._file.name} announces {count:,} {what}; {most:,} at most are right")
        return count

    def _text(self, most: int) -> str:
        length = self._count(most, "bytes of a text")
        at = self._take(length)
        try:
            return self._data[at : at + length].decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"its {self._file.name} has a text that is no UTF-8, at {at:,}") from error

    def _name(self) -> str:
        name = self._text(MOST_NAME)
        if not name.isprintable():
            raise ConfigError(f"its {self._file.name} has a name that cannot be printed, before {self._at:,}")
        return name

    def _value(self, key: str) -> Value:
        kind = self._number(_U32)
        if kind == _TEXT:
            return self._text(MOST_TEXT)
        if kind != _ARRAY:
            form = struct.Struct("<" + self._form(kind, key))
            value: int | float = form.unpack_from(self._data, self._take(form.size))[0]
            return value
        kind = self._number(_U32)
        count = self._count(MOST_ENTRIES, f"entries of {key[:100]}")
        if kind == _TEXT:
            self._take(8 * count)  # each text has a length at least
            self._at -= 8 * count
            return [self._text(MOST_TEXT) for _ in range(count)]
        form = struct.Struct("<" + self._form(kind, key))
        at = self._take(form.size * count)
        return array(form.format[1:], self._data[at : at + form.size * count])

    def _form(self, kind: int, key: str) -> str:
        form = _SCALARS.get(kind)
        if form is None:
            raise ConfigError(f"its {self._file.name}: {key[:100]} has a value of an unknown type, {kind}")
        return form

    def _check(self, values: Mapping[str, Value]) -> None:
        """Refuses a file that is one of several, or does not say what it is."""
        parts = values.get("split.count", 1)
        if parts not in (0, 1):
            raise ConfigError(
                f"its {self._file.name} is one of {parts} parts of a model; one file that holds all is "
                "right, as `llama-gguf-split --merge` makes it"
            )
        if not isinstance(values.get("general.architecture"), str):
            raise ConfigError(f"its {self._file.name} does not say its general.architecture")

    def _record(self) -> TensorRecord:
        name = self._name()
        where = f"its {self._file.name}: {name[:100]}"
        dimensions = self._number(_U32)
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise ConfigError(f"{where} has {dimensions:,} dimensions; 1 to {MOST_DIMENSIONS} are right")
        shape = tuple(reversed([self._number(_U64) for _ in range(dimensions)]))
        kind, offset = self._number(_U32), self._number(_U64)
        form = SERVED.get(kind)
        if form is None:
            told = OTHERS.get(kind, f"{kind}, which is unknown")
            right = ", ".join(one.name for one in SERVED.values())
            raise ConfigError(f"{where} is of the type {told}, which is not served; {right} are right")
        if math.prod(shape) >= 1 << 48 or min(shape) < 1 or shape[-1] % form.block:
            raise ConfigError(
                f"{where} has the shape {list(shape)}, which cannot be: a row of {form.name} has a multiple "
                f"of {form.block} numbers"
            )
        return TensorRecord(name, form, shape, offset)

    def _placed(
        self, records: Sequence[TensorRecord], values: Mapping[str, Value]
    ) -> Mapping[str, TensorRecord]:
        """Returns the tensors by name, with their places in the file. The header counts from its own end."""
        told = values.get("general.alignment", 32)
        alignment = told if isinstance(told, int) else 0
        if not 1 <= alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
            raise ConfigError(f"its general.alignment is {told!s:.40}; a power of two is right")
        begin = -(-self._at // alignment) * alignment
        placed: dict[str, TensorRecord] = {}
        size = len(self._data)
        for record in records:
            offset = begin + record.offset
            if record.name in placed:
                raise ConfigError(f"its {self._file.name} has {record.name[:100]} twice")
            if record.offset % alignment:
                raise ConfigError(
                    f"its {self._file.name}: {record.name[:100]} lies at {record.offset:,}, which is no "
                    f"multiple of {alignment}"
                )
            if offset + record.nbytes > size:
                raise ConfigError(
                    f"its {self._file.name} is cut short: its {record.name[:100]} ends at "
                    f"{offset + record.nbytes:,}, and the file has {size:,} bytes; a whole file is right"
                )
            placed[record.name] = TensorRecord(record.name, record.type, record.shape, offset)
        end = begin
        for record in sorted(placed.values(), key=lambda one: one.offset):
            if record.offset < end:
                raise ConfigError(f"its {self._file.name}: {record.name[:100]} lies over another tensor")
            end = record.offset + record.nbytes
        return placed
