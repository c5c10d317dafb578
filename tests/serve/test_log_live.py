"""A fleet whose output nobody takes serves on: streams say what they say, engines come back, and it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from kvloom.config.config import DEMO
from tests.processes import DEADLINE, Fleet, outlived
from tests.serve.streaming import call, streams
from tests.sinks import closed_pipe, full_disk, unread_pipe

CONFIG = f"""
kv_memory: 16MiB
models: {{stories: {DEMO}/stories}}
units: [{{models: [stories], replicas: 2}}]
"""

LISTENS = "0A"  # as the kernel writes a socket's state


class Mute(Fleet):
    """A fleet that prints to `sink`, so that its port is found by its sockets."""

    def __init__(self, arguments: list[str], sink: int, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvloom.cli", "serve", "--port", "0", *arguments],
            stdout=sink,
            stderr=sink,
            text=True,
            env=os.environ
            | {"TMPDIR": str(folder), "PYTHONUNBUFFERED": ""},  # a buffer has to be flushed at the end
        )

    @property
    def port(self) -> int:
        """Returns the TCP port at which its supervisor listens; 0 as long as it does not."""
        sockets = set[str]()
        for handle in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it is closed by now
                sockets.add(os.readlink(handle))
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in sockets:
                return int(fields[1].rpartition(":")[2], 16)
        return 0


def eventually(there: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not there():
        assert time.monotonic() < deadline, f"{what} never came"
        time.sleep(0.05)


def answers(url: str) -> bool:
    with suppress(urllib.error.URLError, ConnectionError):
        return bool(call(url, "/health"))
    return False


@contextmanager
def mute(folder: Path, sink: int) -> Iterator[Mute]:
    """A fleet that prints to `sink`, and ends by SIGTERM."""
    file = folder / "fleet.yaml"
    file.write_text(CONFIG)
    started = Mute([str(file)], sink, folder)
    try:
        eventually(lambda: started.port > 0, "the fleet's port")
        started.url = f"http://127.0.0.1:{started.port}"
        eventually(lambda: answers(started.url), "the fleet")
        yield started
        with outlived([*started.children().values()]):
            started.process.send_signal(signal.SIGTERM)
            assert started.process.wait(DEADLINE) == 0
    finally:
        started.process.kill()
        started.process.wait()


def check_serves_on(mute: Mute, unit: str) -> None:
    """Bad requests, and the unit's death, are logged under streams."""
    killed, port = mute.children()[unit], int(mute.url.rpartition(":")[2])
    with streams(mute.url, 60, stories=4) as ended:
        for _ in range(100):
            with socket.create_connection(("127.0.0.1", port)) as one:
                one.sendall(b"\0garbage\r\n\r\n")
                one.recv(1)
        os.kill(killed, signal.SIGKILL)
        before = len(ended)
        eventually(lambda: mute.children().get(unit, killed) != killed, "another engine")
        eventually(lambda: len(ended) >= before + 8, "the end of streams")


@pytest.mark.parametrize("sink", [full_disk, unread_pipe, closed_pipe])
def test_a_log_that_nobody_takes(tmp_path: Path, sink: Callable[[], AbstractContextManager[int]]) -> None:
    with sink() as output, mute(tmp_path, output) as fleet:
        check_serves_on(fleet, "unit-0")
