"""The machine before a fleet starts: an address, a private folder, and open files."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Final

from kvloom.types.errors import ConfigError

BACKLOG: Final = 2048
OPEN_FILES: Final = 1 << 16
PREFIX: Final = "kvloom-"
LOCK: Final = "owner"  # The file that the owner of a folder for sockets has locked as long as it lives.
MOST_LOOKED_AT, MOST_REMOVED = 100_000, 100  # names in the temporary folder; folders that are left over
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
def listen_inside(path: Path) -> Iterator[socket.socket]:
    """Lets the fleet's own processes connect, whatever becomes of the address at which all others do."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(BACKLOG)
        yield listener


@contextmanager
def private_folder() -> Iterator[Path]:
    """Makes a folder for sockets, which nobody else can enter, and removes those that earlier fleets of this
    user have left over, of which no process was alive any more to remove it."""
    remove_left_over(Path(tempfile.gettempdir()))
    folder = tempfile.mkdtemp(prefix=PREFIX)
    lock = None
    try:
        lock = _own(Path(folder))
        if len(os.fsencode(folder)) > LONGEST_FOLDER:
            raise ConfigError(f"TMPDIR: {folder} is too long for a socket's path; name a shorter folder")
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _own(folder: Path) -> int:
    """Locks the folder until the returned descriptor is closed, which no child inherits. The lock's file has
    its name only once it is locked, so that nobody takes a new folder for one that is left over."""
    made = folder / f"{LOCK}.new"
    lock = os.open(made, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    made.rename(folder / LOCK)
    return lock


def remove_left_over(place: Path) -> None:
    """Removes the folders for sockets in `place` that are this user's and whose owner is dead."""
    with suppress(OSError), os.scandir(place) as entries:
        found = (entry.name for entry in islice(entries, MOST_LOOKED_AT) if entry.name.startswith(PREFIX))
        for name in list(islice(found, MOST_REMOVED)):
            with suppress(OSError):
                _remove_if_left_over(place / name)


def _remove_if_left_over(folder: Path) -> None:
    """Raises OSError if the folder has an owner who lives, or was not made by `private_folder`."""
    there = folder.lstat()
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid():
        return
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:  # else another one has just removed it
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def raise_open_files() -> None:
    """Raises the limit of open files, because each stream holds a connection on both sides of the gateway."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
