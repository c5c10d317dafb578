"""Other processes: their CPU time, and busy ones beside what is measured."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop

from kvloom.types.clock import ending
from kvloom.types.errors import ConfigError

PROC: Final = Path("/proc")
NANOSECOND: Final = 1e-9


def descendants(pid: int) -> dict[int, str]:
    """Returns the processes that any thread of `pid` has started, and those that these have: their command
    lines by pid."""
    tasks = (PROC / str(pid) / "task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    found = {child: _command(child) for child in children}
    for child in children:
        found |= descendants(child)
    return found


def main_thread_seconds(pid: int) -> float:
    """Returns the CPU time of the thread that a process began with."""
    return _seconds(PROC / str(pid) / "task" / str(pid))


def all_threads_seconds(pid: int) -> float:
    """Returns the CPU time of the threads that a process has now."""
    return sum(_seconds(task) for task in (PROC / str(pid) / "task").iterdir())


def _seconds(task: Path) -> float:
    """Returns CPU time by the scheduler's own count, if the kernel keeps it, or else by its ticks."""
    try:
        return int((task / "schedstat").read_text().split()[0]) * NANOSECOND
    except FileNotFoundError:
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _command(pid: int) -> str:
    return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Crowd:
    """Processes that work as a gateway does under load, in bursts, and may rest."""

    processes: list[subprocess.Popen[bytes]]

    def rest(self) -> None:
        self._signal(signal.SIGSTOP)

    def work(self) -> None:
        self._signal(signal.SIGCONT)

    @property
    def cpu_seconds(self) -> float:
        """Returns the CPU seconds of all processes up to now."""
        return sum(main_thread_seconds(process.pid) for process in self.processes)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)


@contextmanager
def busy_processes(count: int) -> Iterator[Crowd]:
    """Yields so many processes that work until the block ends. Raises ConfigError if one cannot start."""
    with ExitStack() as stack:
        running = []
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-m", __name__], stdout=subprocess.PIPE)
            stack.enter_context(process)
            stack.callback(process.kill)
            running.append(process)
        for process in running:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise ConfigError(
                    f"a busy process beside jobs {ending(process.wait())}; more memory may be right"
                )
        yield Crowd(running)


BURST: Final = 0.0004  # seconds; a gateway's turn is about as long
_EVENTS: Final = 2000  # what they hold is more than a core's first cache


async def _work_in_bursts() -> None:
    """Sends events of a stream to itself in bursts, and rests for as long after each."""
    loop, (here, there) = asyncio.get_running_loop(), socket.socketpair()
    for end in (here, there):
        end.setblocking(False)
    events: list[Any] = [
        {"id": f"cmpl-{i}", "created": i, "choices": [{"index": 0, "text": "word", "logprobs": None}]}
        for i in range(_EVENTS)
    ]
    print(flush=True)
    at = 0
    while True:
        begun = time.perf_counter()
        while time.perf_counter() - begun < BURST:
            at = (at + 7) % _EVENTS  # the next ones lie elsewhere
            await loop.sock_sendall(here, b"data: " + msgspec.json.encode(events[at]) + b"\n\n")
            events[at] = msgspec.json.decode((await loop.sock_recv(there, 1 << 16))[6:])
        await asyncio.sleep(time.perf_counter() - begun)


if __name__ == "__main__":
    uvloop.run(_work_in_bursts())
