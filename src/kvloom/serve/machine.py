"""The machine before a fleet starts: an address, a private folder, and open files."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvloom.types.errors import ConfigError

BACKLOG: Final = 2048
OPEN_FILES: Final = 1 << 16
LONGEST_FOLDER: Final = 90  # with the socket's name within the 107 bytes that a path may have


@contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """Callers may connect from now on, and are answered once the fleet is ready."""
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "no name of a machine"
        raise ConfigError(f"host: {host}: {problem}; an address of this machine is right") from error
    try:
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"host: {host} is not this machine; an address of it is right") from error
        problem = os.strerror(error.errno).lower() if error.errno else str(error)
        raise ConfigError(
            f"port: {port} at {host}: {problem}; another, or 0 for any free one, is right"
        ) from error
    with listener:
        yield listener


@contextmanager
def private_folder() -> Iterator[Path]:
    """Makes a folder for sockets, which nobody else can enter."""
    folder = tempfile.mkdtemp(prefix="kvloom-")
    try:
        if len(os.fsencode(folder)) > LONGEST_FOLDER:
            raise ConfigError(f"TMPDIR: {folder} is too long for a socket's path; name a shorter folder")
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def raise_open_files() -> None:
    """Raises the limit of open files, because each stream holds a connection on both sides of the gateway."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
