"""The journal as lines of JSON in a file, which is bounded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from kvloom.journal.records import Record

MOST_BYTES: Final = 16 << 20
MOST_FILES: Final = 4


class JournalFile:
    """A file to whose end records are written, for its owner's eyes alone. Once it has `most` bytes it
    becomes FILE.1, that one FILE.2, and so on; so there are at most `files` of them."""

    def __init__(self, path: Path, *, most: int | None = MOST_BYTES, files: int = MOST_FILES) -> None:
        """most: None for a file that is never rotated."""
        self._path = path
        self._most = most
        self._files = files
        self._torn = False

    def write(self, records: Sequence[Record]) -> None:
        """Writes a line for each record. May block. Raises OSError."""
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            text = b"\n" * self._torn + lines
            written = os.write(file, text)
            self._torn = 0 < written < len(text)
            if written < len(text):
                raise OSError("the disk is full")
            full = self._most is not None and os.fstat(file).st_size >= self._most
        finally:
            os.close(file)
        if full:
            self._rotate()

    def begin(self) -> None:
        """Empties the file, which is made if it is not there. Raises OSError."""
        os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))

    def _rotate(self) -> None:
        named = [self._path, *(self._path.with_name(f"{self._path.name}.{n}") for n in range(1, self._files))]
        for older, newer in zip(reversed(named), reversed(named[:-1]), strict=False):
            with suppress(FileNotFoundError):
                newer.replace(older)
