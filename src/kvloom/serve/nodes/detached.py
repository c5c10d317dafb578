"""Processes that outlive the process that has started them. A later one finds such a process by a file that
it has locked."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvloom.types.errors import ConfigError, Unavailable

LOOKS, LOOK_SECONDS = 20, 0.05  # for those who look whether a file is locked to be done with it
# The shell ends at once, so that the process is nobody's child. It gives the null device to what it leaves in
# the background, so the order comes by another descriptor.
_DETACHED: Final = 'exec 3<&0; "$@" <&3 3<&- &'


def address_at(lock: Path) -> str:
    """Returns the address of the process that has locked `lock`; nothing if none runs."""
    return _told(lock)[0]


def end(lock: Path, seconds: float, by: signal.Signals = signal.SIGTERM) -> bool:
    """Ends the process that has locked `lock` by a signal, and waits for that. Returns whether none runs."""
    _, pid = _told(lock)
    if not pid:
        return True
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        signal.pidfd_send_signal(process, by)
        ended = select.poll()  # `select.select` takes no descriptor above 1,023.
        ended.register(process, select.POLLIN)
        return bool(ended.poll(seconds * 1e3))
    finally:
        os.close(process)


def _told(lock: Path) -> tuple[str, int]:
    """Returns the address and the id of the process that has locked `lock`; neither if none runs."""
    try:
        file = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return "", 0
    try:
        if os.fstat(file).st_uid != os.getuid():  # somebody else's, who may write what they like
            return "", 0
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:  # It is alive.
        address, _, pid = os.read(file, 1 << 10).decode().rpartition(" ")
        return address, int(pid or 0)
    else:
        return "", 0
    finally:
        os.close(file)


def find_or_start(lock: Path, module: str, order: bytes, log: Path, environment: Mapping[str, str]) -> str:
    """Returns the address of the process that has locked `lock`. It is started if none runs.

    module: the module that it runs; order: a line for its stdin; log: the file that takes its stderr. Raises
    Unavailable with the last line of the log if it ends as it starts, and OSError if it cannot be started."""
    if address := address_at(lock):
        return address
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), "ab") as errors:
        process = subprocess.Popen(
            ["sh", "-c", _DETACHED, "sh", sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            env=environment,
        )
    said, _ = process.communicate(order + b"\n")
    if address := said.decode().strip() or address_at(lock):  # or another one was started at the same time
        return address
    lines = log.read_text(errors="replace").strip().splitlines()
    raise Unavailable(lines[-1] if lines else f"it has ended as it started, and {log} is empty")


def claim(lock: Path, address: str, what: str) -> None:
    """Locks `lock` until this process ends, and writes the address there and to the process that has started
    this one, to which nothing is written any more. what: the name of this process for people. Raises
    ConfigError if another one runs."""
    file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    if not _locked(file):
        raise ConfigError(f"this host has {what} already; one is right")
    if not os.fstat(file).st_nlink:
        raise ConfigError(f"{what} has just ended on this host; another attempt is right")
    os.truncate(file, 0)
    os.write(file, f"{address} {os.getpid()}".encode())
    print(address, flush=True)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, sys.stdout.fileno())
    os.close(silent)


def _locked(file: int) -> bool:
    """Locks a file, unless a process has it. A process that looks whether it is locked locks it itself for a
    moment."""
    for _ in range(LOOKS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOOK_SECONDS)
        else:
            return True
    return False


def environment_of_ray() -> dict[str, str]:
    """Returns, in an actor, the environment with which Ray was started on this node, and not what Ray has
    added for its workers, as bounds on threads and devices."""
    raw = Path(f"/proc/{os.getppid()}/environ").read_bytes().decode(errors="surrogateescape")
    pairs = (line.partition("=") for line in raw.split("\0") if "=" in line)
    return {name: value for name, _, value in pairs if not name.startswith("RAY_")}
