"""Files to which lines are appended, which may be bounded; the journal as such a file of JSON."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvloom.journal.records import Record

MOST_BYTES: Final = 16 << 20
MOST_FILES: Final = 4


class AppendedFile:
    """A regular file to whose end lines are written, for its owner's eyes alone. It is opened for each write,
    so that it may be moved away at any time, as those do that rotate logs.

    With a bound it is rotated before it is written once it has so many bytes: it becomes FILE.1, that one
    FILE.2, and so on. If it cannot be rotated, nothing is written to it.
    """

    def __init__(self, path: Path, *, most: int | None = None, files: int = MOST_FILES) -> None:
        """`most` is its bound in bytes, None for a file that is never rotated; `files` is the most files that
        there are if it is rotated."""
        self._path = path
        self._most = most
        self._files = files
        self._torn = False  # the last line was written in part

    def append(self, lines: bytes) -> None:
        """Writes lines. May block for as long as a disk does. Raises OSError."""
        if self._most is not None and os.path.isfile(self._path) and self._path.lstat().st_size >= self._most:
            self._rotate()
        file = self._open()
        try:
            self._write(file, lines)
        finally:
            os.close(file)

    def begin(self) -> None:
        """Empties the file, which is made if it is not there. Raises OSError."""
        os.close(self._open(os.O_TRUNC))

    def _open(self, flags: int = 0) -> int:
        """Returns the file's descriptor. Raises OSError, also for what would hold the writer up, as a pipe
        does that nobody reads, and for what cannot be rotated, as a link to another file."""
        flags |= os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            file = os.open(self._path, flags, 0o600)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a pipe without a reader, or a socket
                raise _irregular() from error
            raise
        there = os.fstat(file)
        moves = self._most is None or os.path.samestat(there, self._path.lstat())
        if stat.S_ISREG(there.st_mode) and moves:
            return file
        os.close(file)
        raise _irregular()

    def _write(self, file: int, lines: bytes) -> None:
        """Writes all, or raises the reason why the rest could not be written."""
        torn = int(self._torn and os.fstat(file).st_size > 0)
        text, written = memoryview(b"\n" * torn + lines), 0
        try:
            while written < len(text):
                written += os.write(file, text[written:])
        finally:
            if written:
                self._torn = torn < written < len(text)

    def _rotate(self) -> None:
        """Moves the files, up to the first free name: one that fails again and again costs no file."""
        named = [self._path, *(self._path.with_name(f"{self._path.name}.{n}") for n in range(1, self._files))]
        free = next((place for place, one in enumerate(named) if not os.path.lexists(one)), len(named) - 1)
        for place in range(free, 0, -1):
            named[place - 1].replace(named[place])


def _irregular() -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file, as it has to be")


class JournalFile(AppendedFile):
    """A file of records."""

    def __init__(self, path: Path, *, most: int | None = MOST_BYTES, files: int = MOST_FILES) -> None:
        super().__init__(path, most=most, files=files)

    def write(self, records: Sequence[Record]) -> None:
        """Writes a line for each record. May block for as long as a disk does. Raises OSError."""
        self.append(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
