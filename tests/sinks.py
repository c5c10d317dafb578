"""What a fleet may be told to print to, and that takes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def full_disk() -> Iterator[int]:
    """A file on a full disk."""
    disk = os.open("/dev/full", os.O_WRONLY)
    yield disk
    os.close(disk)


@contextmanager
def unread_pipe() -> Iterator[int]:
    """A pipe that is full, and that nobody reads."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"." * 4096)
    os.set_blocking(writer, True)
    yield writer
    os.close(writer)
    os.close(reader)


@contextmanager
def closed_pipe() -> Iterator[int]:
    """A pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)
