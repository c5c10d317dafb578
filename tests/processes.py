"""Real processes in tests: started, waited for, and looked for afterwards."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

DEADLINE: Final = 120.0
_URL: Final = re.compile(r"http://\S+")


class Fleet:
    """A running `kvloom serve`. Its output goes to a pipe; what was read of it is in `output`."""

    def __init__(self, arguments: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvloom.cli", "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.output = ""
        self.url = ""

    def wait_for(self, words: str) -> str:
        """The first line that holds `words`."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            self.output += line
            if words in line:
                return line
        raise AssertionError(f"{words!r} never came: {self.output}{self.errors()}")

    def wait_until_ready(self) -> str:
        """Its URL."""
        found = _URL.search(self.wait_for("Ready in"))
        assert found is not None
        return found.group()

    def children(self) -> dict[str, int]:
        """Process ids by the module that each runs."""
        return {module: pid for pid, module in _children(self.process.pid)}

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE)

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()


@contextmanager
def fleet(*arguments: str) -> Iterator[Fleet]:
    started = Fleet(list(arguments))
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        started.process.communicate()


@contextmanager
def outlived(pids: list[int]) -> Iterator[None]:
    """After the block none of these processes lives any more; they have time until the deadline."""
    handles = [os.pidfd_open(pid) for pid in pids]
    try:
        yield
        for handle in handles:
            assert select.select([handle], [], [], DEADLINE)[0], f"one of {pids} is still there"
    finally:
        for handle in handles:
            os.close(handle)


def _children(parent: int) -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                words = (folder / "cmdline").read_text().split("\0")
                yield int(folder.name), words[words.index("-m") + 1].rpartition(".")[2]
