"""A file's lines with their numbers, one at a time, and what is wrong with one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from kvloom.types.errors import ConfigError

T = TypeVar("T")

LONGEST_LINE: Final = 16 << 20  # bytes


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Without line ends; empty lines are left out. Raises ConfigError."""
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise bad_line(path, number, f"is longer than {LONGEST_LINE >> 20} MiB")
                if text := line.strip():
                    yield number, text
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; the path of a workload file is right") from error


def decode_line(path: Path, number: int, text: bytes, decode: Callable[[bytes], T]) -> T:
    """Raises ConfigError."""
    try:
        return decode(text)
    except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        raise bad_line(path, number, str(error)) from error


def bad_line(path: Path, number: int, problem: str) -> ConfigError:
    return ConfigError(f"{path}: line {number}: {' '.join(problem.split())}")
