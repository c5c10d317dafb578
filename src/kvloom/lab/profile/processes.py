"""Other processes: their CPU time, and busy ones beside what is measured."""

from __future__ import annotations

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
    return _scheduled(task)[0]


def _scheduled(task: Path) -> tuple[float, float]:
    """Returns the seconds for which a thread had a core, and those for which it waited for one, by the
    scheduler's own count. If the kernel keeps none, the first are by its ticks, and the second are 0."""
    try:
        ran, waited = (task / "schedstat").read_text().split()[:2]
    except FileNotFoundError:
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), 0.0
    return int(ran) * NANOSECOND, int(waited) * NANOSECOND


def _command(pid: int) -> str:
    return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class BusyProcesses:
    """Processes that work as a gateway does under load, in bursts, and may rest."""

    processes: list[subprocess.Popen[bytes]]

    def rest(self) -> None:
        self._signal(signal.SIGSTOP)

    def work(self) -> None:
        self._signal(signal.SIGCONT)

    @property
    def wanted_seconds(self) -> float:
        """Returns the seconds up to now for which the processes had a core or waited for one, of all
        together."""
        tasks = (PROC / str(process.pid) / "task" / str(process.pid) for process in self.processes)
        return sum(sum(_scheduled(task)) for task in tasks)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)


@contextmanager
def busy_processes(count: int) -> Iterator[BusyProcesses]:
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
        yield BusyProcesses(running)


PROCESS_BURST: Final = 0.0004  # seconds; a gateway's turn is about as long
_EVENTS: Final = 2000  # what they hold is more than a core's first cache


def _work_in_bursts() -> None:
    """Sends events of a stream to itself in bursts, and rests for as long after each. The rests are
    plain sleeps, because an event loop's timers have whole milliseconds."""
    here, there = socket.socketpair()
    events: list[Any] = [
        {"id": f"cmpl-{i}", "created": i, "choices": [{"index": 0, "text": "word", "logprobs": None}]}
        for i in range(_EVENTS)
    ]
    print(flush=True)
    at = 0
    while True:
        begun = time.perf_counter()
        while time.perf_counter() - begun < PROCESS_BURST:
            at = (at + 7) % _EVENTS  # the next ones lie elsewhere
            here.sendall(b"data: " + msgspec.json.encode(events[at]) + b"\n\n")
            events[at] = msgspec.json.decode(there.recv(1 << 16)[6:])
        time.sleep(time.perf_counter() - begun)


if __name__ == "__main__":
    _work_in_bursts()
