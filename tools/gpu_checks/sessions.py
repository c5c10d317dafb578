"""Processes with all that they have started: each begins a session of its own, which is ended as one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Final

_WITH_PARENT: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which outlives the exec
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Sessions:
    """Those that are under way."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []

    @contextmanager
    def started(
        self, command: Sequence[str], *, out: IO[str] | None = None, err: IO[str] | int | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        """Ended with what it has started, at the latest when this is left; by itself when this process is
        gone, or else it would use the device beside the next run."""
        process = subprocess.Popen(
            [sys.executable, "-c", _WITH_PARENT, *command],
            stdout=out,
            stderr=err,
            start_new_session=True,
            text=True,
        )
        self._running.append(process)
        try:
            yield process
        finally:
            _kill(process)
            self._running.remove(process)
            process.wait()

    def kill(self) -> None:
        """All of them, from any thread. Who waits for one finds it ended."""
        for process in list(self._running):
            _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
