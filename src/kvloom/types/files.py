"""Files that are replaced whole, and whether files have changed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_Stamp = tuple[int, ...] | None  # None if there is no such file


@contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Gives a file to write to, which takes the place of `path` once the block has ended well, so that half
    of it is never read. Raises OSError if that cannot be done. After any error what was there before stays.

    `mode` says who may read it, of those whom the process's umask lets.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as made:
            yield made
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


class FileWatch:
    """Tells whether any of some files has changed, was replaced, has come or has gone."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._seen = self._look()

    def changed(self) -> bool:
        """Returns whether the files are others than when it was made, or asked last."""
        before, self._seen = self._seen, self._look()
        return self._seen != before

    def _look(self) -> list[_Stamp]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> _Stamp:
    """Returns what tells one state of a file from another."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
