"""Launches the fork server's process.

`kvloom serve` does so first of all, and reads its config while that process imports torch. So this file needs
the standard library alone.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

NAME: Final = "forkserver"
MODULE: Final = "kvloom.serve.forkserver_process"
ORDERS: Final = 0
"""The descriptor at which each process that the supervisor starts takes its orders: its stdin."""
ENVIRONMENT: Final = {"PYTHONUNBUFFERED": "1", "TQDM_MININTERVAL": "3"}
SINGLE_THREADED: Final = {"OPENBLAS_NUM_THREADS": "1"}  # numpy's library starts its threads when it is loaded


@dataclass(frozen=True, slots=True)
class LaunchedForkServer:
    """A fork server's process."""

    process: subprocess.Popen[bytes]
    """Its stdout and stderr are a pipe."""
    connection: socket.socket
    """The supervisor's end of the socket at which it is asked for forks."""

    def end(self) -> None:
        """Kills the process, and waits for its end. Its output may still be read."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def launch(module: str = MODULE) -> LaunchedForkServer:
    """Starts the process. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(ORDERS), NAME],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,  # keeps a terminal's Ctrl-C for the supervisor alone
                env=os.environ | ENVIRONMENT | SINGLE_THREADED,
            )
        except BaseException:
            ours.close()
            raise
    return LaunchedForkServer(process, ours)


@contextmanager
def launched() -> Iterator[LaunchedForkServer | None]:
    """Launches the process, which does not outlive the block. Yields None if that fails: the fleet tries it
    again later, and starts its engines as new interpreters meanwhile."""
    try:
        made = launch()
    except OSError:
        yield None
        return
    with made.process:
        try:
            yield made
        finally:
            made.end()
