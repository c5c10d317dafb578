"""Real processes in tests: started, waited for, and looked for afterwards."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn

DEADLINE: Final = 120.0
KVLOOM: Final = (sys.executable, "-m", "kvloom.cli")
_URL: Final = re.compile(r"https?://\S+")


class Fleet:
    """A running `kvloom serve`. Its output goes to a pipe; what was read of it is in `output`. folder: where
    it keeps its sockets; command: which kvloom it is."""

    def __init__(
        self, arguments: list[str], folder: Path | None = None, command: Sequence[str] = KVLOOM
    ) -> None:
        self.process = subprocess.Popen(
            [*command, "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | ({"TMPDIR": str(folder)} if folder else {}),
        )
        self.output = ""
        self.url = ""
        self._unread = b""

    def wait_for(self, words: str) -> str:
        """The first line that holds `words`, of those that were not looked at yet."""
        deadline = time.monotonic() + DEADLINE
        while True:
            while b"\n" in self._unread:
                raw, _, self._unread = self._unread.partition(b"\n")
                line = raw.decode() + "\n"
                self.output += line
                if words in line:
                    return line
            self._unread += self._read(deadline) or self._fail(words)

    def _read(self, deadline: float) -> bytes:
        assert self.process.stdout is not None
        file = self.process.stdout.fileno()
        return os.read(file, 1 << 16) if is_readable(file, deadline - time.monotonic()) else b""

    def _fail(self, words: str) -> NoReturn:
        self.process.kill()
        raise AssertionError(f"{words!r} never came: {self.output}{self.errors()}")

    def wait_until_ready(self) -> str:
        """Its URL."""
        found = _URL.search(self.wait_for("Ready in"))
        assert found is not None
        return found.group()

    def children(self) -> dict[str, int]:
        """Process ids by component: gateway, unit-0, … The fork server stands for those it has forked; those
        that have lost theirs are not found."""
        found = _children(self.process.pid)
        while (server := found.pop("forkserver", None)) is not None:  # also a fork that has no name yet
            found |= _children(server)
        return found

    def fork_server(self) -> int:
        return _children(self.process.pid)["forkserver"]

    def ranks(self, unit: str) -> dict[str, int]:
        """Process ids of a unit's ranks but the first, which is the unit's own process."""
        return _children(self.children()[unit])

    def rest(self) -> str:
        """All it has said, once it has ended."""
        assert self.process.stdout is not None
        self.output += self._unread.decode() + self.process.stdout.read()
        self._unread = b""
        return self.output

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE)

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()


@contextmanager
def fleet(*arguments: str, folder: Path | None = None, command: Sequence[str] = KVLOOM) -> Iterator[Fleet]:
    started = Fleet(list(arguments), folder, command)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        started.process.communicate()


def is_readable(descriptor: int, seconds: float) -> bool:
    """Waits so many seconds at most. In a run of all tests there are descriptors above 1,023, for which there
    is no `select.select`."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1e3))


@contextmanager
def outlived(pids: list[int]) -> Iterator[None]:
    """After the block none of these processes lives any more; they have time until the deadline."""
    handles = [os.pidfd_open(pid) for pid in pids]
    try:
        yield
        for handle in handles:
            assert is_readable(handle, DEADLINE), f"one of {pids} is still there"
    finally:
        for handle in handles:
            os.close(handle)


@contextmanager
def leaves_nothing(fleet: Fleet, folder: Path) -> Iterator[None]:
    """After the block there is no process, no socket and no shared memory of this fleet. folder: its own."""
    assert list(folder.iterdir())
    pids = [fleet.process.pid, fleet.fork_server(), *fleet.children().values()]
    arenas = {arena for pid in pids for arena in _arenas(Path("/proc", str(pid)))}
    assert arenas
    with outlived(pids[1:]):
        yield
    assert not list(folder.glob("kvloom-*"))
    for process in Path("/proc").glob("[0-9]*"):
        assert not arenas & set(_arenas(process)), f"{process.name} holds on to an arena"


def _arenas(process: Path) -> Iterator[str]:
    """The inodes of the arenas that a process maps."""
    with suppress(OSError):
        for line in (process / "maps").read_text().splitlines():
            if "memfd:kvloom-arena" in line:
                yield line.split()[4]


def _children(parent: int) -> dict[str, int]:
    """Process ids by the names that commands end with."""
    found: dict[str, int] = {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                words = (folder / "cmdline").read_text().replace("\0", " ").split()
                found[words[words.index("-m") + 3]] = int(folder.name)
    return found
