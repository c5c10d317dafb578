"""The folder of kept prefixes: a file for each page, whole or not there.

A file is written beside its place and renamed, so that a process that is killed at any byte leaves nothing
that is read; a checksum finds what else may befall it. Engines share a folder: each reads what others write,
any of them removes the oldest files, and a file that vanishes is one that is not there. Nothing else in the
folder is touched.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Final

import numpy as np

from kvloom.types.files import replacing
from kvloom.types.geometry import AnyArray

MAGIC: Final = b"kvloom K and V 1"
SUFFIX: Final = ".kv"
IDENTITY_BYTES: Final = 16
SLACK: Final = 0.9  # of the size, to which a full folder is emptied
COUNTED: Final = 1 / 16  # of the size, after which the folder is looked at anew: others write, too
LEFT_BEHIND: Final = 600.0  # seconds after which an unfinished file is of a process that was killed

_CHECK: Final = struct.Struct("<I")
_MODEL: Final = re.compile(rf"[0-9a-f]{{{2 * IDENTITY_BYTES}}}")
_ROOT: Final = re.compile(r"[0-9a-f]{48}")
_PAGE: Final = re.compile(r"[0-9a-f]{48}\.kv")
_UNFINISHED: Final = re.compile(r"\.[0-9a-f]{48}\.kv\.[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class PagePlace:
    """The place of a page's file: which model's it is, which root's, and its own key."""

    identity: bytes
    root: bytes
    key: bytes

    @property
    def parts(self) -> tuple[str, str, str]:
        return self.identity.hex(), self.root.hex(), self.key.hex() + SUFFIX

    @property
    def head(self) -> bytes:
        """Returns the first bytes of the file; those of its checksum follow, and then the page."""
        return MAGIC + self.identity + self.root + self.key


class PrefixFolder:
    """The files. Its methods are called on threads, and may take as long as the disk does."""

    def __init__(self, path: Path, size: int) -> None:
        """size: bytes that all files may have together."""
        self.path = path
        self.size = size
        self._counted = 0  # bytes of all files, when they were last counted
        self._written = 0  # bytes written since
        self._fresh = False  # whether they were counted at all

    def write(self, place: PagePlace, page: AnyArray) -> None:
        """Keeps a page, and removes the oldest ones if the folder is full. Raises OSError, and then leaves
        nothing."""
        if not self._fresh or self._written > COUNTED * self.size or self._full:
            self.trim()
        file = self._file(place)
        head, data = place.head, page.data.cast("B")
        check = zlib.crc32(data, zlib.crc32(head))
        try:
            self._write(file, head, check, data)
        except FileNotFoundError:
            file.parent.mkdir(0o700, parents=True, exist_ok=True)
            self._write(file, head, check, data)
        self._written += len(head) + _CHECK.size + len(data)

    @property
    def _full(self) -> bool:
        return self._counted + self._written > self.size

    @staticmethod
    def _write(file: Path, head: bytes, check: int, data: memoryview) -> None:
        with replacing(file) as made:
            made.write(head + _CHECK.pack(check))
            made.write(data)

    def read(self, place: PagePlace, size: int) -> AnyArray | None:
        """Returns a page of `size` bytes; None if it is not there. One that is damaged is removed. Raises
        OSError."""
        file, head = self._file(place), place.head
        before = len(head) + _CHECK.size
        try:
            opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with open(opened, "rb", buffering=0) as kept:
            found = os.fstat(opened)
            whole = np.empty(before + size, np.uint8)
            if stat.S_ISREG(found.st_mode) and found.st_size == whole.size and _filled(kept, whole.data):
                check = zlib.crc32(whole.data[before:], zlib.crc32(head))
                if bytes(whole[:before]) == head + _CHECK.pack(check):
                    with suppress(OSError):  # a folder that is only to be read
                        os.utime(opened)
                    return whole[before:]
        with suppress(OSError):
            file.unlink()
        return None

    def forget(self, identity: bytes, root: bytes, keys: tuple[bytes, ...]) -> None:
        """Removes the pages with these keys; without keys all of the root, without a root all of the model's.
        Raises OSError."""
        if keys:
            for key in keys:
                self._file(PagePlace(identity, root, key)).unlink(missing_ok=True)
            return
        for file, _ in self._files():
            if file.parent.parent.name == identity.hex() and root.hex() in ("", file.parent.name):
                file.unlink(missing_ok=True)

    def trim(self) -> None:
        """Counts the files, and removes the oldest if they have too many bytes, and those that were never
        finished. Raises OSError."""
        found, now = list[tuple[float, int, Path]](), time.time()
        total = 0
        for file, state in self._files():
            size = max(state.st_size, state.st_blocks * 512)
            if file.name.startswith(".") and now - state.st_mtime > LEFT_BEHIND:
                file.unlink(missing_ok=True)
                continue
            found.append((state.st_mtime, size, file))
            total += size
        found.sort(reverse=True)
        if total > self.size:
            while found and total > SLACK * self.size:
                _, size, file = found.pop()
                file.unlink(missing_ok=True)
                total -= size
                with suppress(OSError):  # others are in it
                    file.parent.rmdir()
        self._counted, self._written, self._fresh = total, 0, True

    def _file(self, place: PagePlace) -> Path:
        return self.path.joinpath(*place.parts)

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yields what is ours, unfinished files too."""
        for model in _entries(self.path, _MODEL):
            for root in _entries(model, _ROOT):
                for page in _entries(root, _PAGE, _UNFINISHED):
                    with suppress(FileNotFoundError):
                        yield page, page.lstat()


def _filled(kept: RawIOBase, left: memoryview) -> bool:
    """Reads until the memory is full. Returns whether there were so many bytes."""
    while left:
        count = kept.readinto(left)
        if not count:
            return False
        left = left[count:]
    return True


def _entries(folder: Path, *forms: re.Pattern[str]) -> list[Path]:
    try:
        with os.scandir(folder) as found:
            return [folder / one.name for one in found if any(form.fullmatch(one.name) for form in forms)]
    except (FileNotFoundError, NotADirectoryError):
        return []
