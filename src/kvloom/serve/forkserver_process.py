"""The fork server's process: `python -m kvloom.serve.forkserver_process 0 NAME`, its stdin a socket.

A fork takes along the calling thread alone, and the locks that other threads hold stay locked in it. So
nothing here may start a thread: no job runs, no event loop, and a fork is refused while there is a second
thread. A GPU that was opened before a fork cannot be used after it, so none is.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec
from setproctitle import getproctitle, setproctitle

from kvloom.serve.processes.forkserver import (
    LONGEST_MESSAGE,
    Fork,
    Forked,
    ForkEnded,
    ForkRefused,
    WorksAhead,
)
from kvloom.serve.processes.parent import run_child
from kvloom.serve.processes.prefork import ORDERS

TASKS: Final = Path("/proc/self/task")
QUIET_MILLISECONDS: Final = 1000  # after which nobody seems to need the cores more


class Forks:
    """The processes that were forked from this one, and the supervisor that asks for them."""

    def __init__(self, supervisor: socket.socket, idle: deque[Callable[[], object]]) -> None:
        """idle: the steps that are done while nobody asks."""
        self._supervisor = supervisor
        self._idle = idle
        self._decoder = msgspec.json.Decoder(Fork)
        self._poll = select.poll()
        self._poll.register(supervisor, select.POLLIN)
        self._processes: dict[int, int] = {}  # by pidfd

    def serve(self) -> str | None:
        """Forks until the supervisor has ended, and returns None then. In a forked process: the module that
        it is to run."""
        pause = QUIET_MILLISECONDS
        while True:
            ready = self._poll.poll(pause if self._idle else None)
            pause = QUIET_MILLISECONDS if ready else 0
            if not ready:
                self._tell(WorksAhead(done=False))
                self._idle.popleft()()
                self._tell(WorksAhead(done=True))
            for descriptor, _ in ready:
                if descriptor in self._processes:
                    self._bury(descriptor)
                    continue
                message, given, _, _ = socket.recv_fds(
                    self._supervisor, LONGEST_MESSAGE, 3, socket.MSG_CMSG_CLOEXEC
                )
                if not message:
                    return None
                if module := self._fork(self._decoder.decode(message), *given):
                    return module

    def _fork(self, request: Fork, orders: int, output: int, reports: int) -> str | None:
        """Returns the module to run, in the forked process alone."""
        why = hindrance()
        if why is not None:
            self._refuse(why, orders, output, reports)
            return None
        gc.freeze()  # a collection would write to all pages, which then were shared no longer
        try:
            pid = os.fork()
        except OSError as error:
            self._refuse(f"it cannot fork: {error.strerror}", orders, output, reports)
            return None
        if not pid:
            self._forget()
            become(request, orders, output, reports)
            return request.module
        handle = os.pidfd_open(pid)
        self._processes[handle] = pid
        self._poll.register(handle, select.POLLIN)
        for end in (orders, output, reports):
            os.close(end)
        self._tell(Forked(pid), handle)
        return None

    def _refuse(self, why: str, *descriptors: int) -> None:
        for end in descriptors:
            os.close(end)
        self._tell(ForkRefused(why))

    def _bury(self, handle: int) -> None:
        pid = self._processes.pop(handle)
        self._poll.unregister(handle)
        os.close(handle)
        self._tell(ForkEnded(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))

    def _forget(self) -> None:
        """Closes the descriptors that a forked process must not hold."""
        self._supervisor.close()
        for handle in self._processes:
            os.close(handle)

    def _tell(self, message: Forked | ForkRefused | ForkEnded | WorksAhead, *descriptors: int) -> None:
        """Raises OSError if the supervisor has ended."""
        socket.send_fds(self._supervisor, [msgspec.json.encode(message)], descriptors)


def hindrance() -> str | None:
    """Returns why no process may be forked from this one, None if it may."""
    threads = len(list(TASKS.iterdir()))
    if threads > 1:
        return f"it has {threads} threads"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it has opened a GPU"
    return None


def become(request: Fork, orders: int, output: int, reports: int) -> None:
    """Makes this forked process look like an interpreter that was started for `request`."""
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(orders, ORDERS)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(orders)
    os.close(output)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.argv = [sys.argv[0], str(reports), request.name]
    setproctitle(f"{sys.executable} -P -m {request.module} {reports} {request.name}")
    _reseed()
    gc.enable()


def _reseed() -> None:
    """Seeds numpy's generator anew, which, unlike Python's own, does not get a new seed with each fork."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def serve_forks(prepare: Callable[[], Iterable[Callable[[], object]]]) -> None:
    """Runs a fork server, or a process that it has forked, from its start to its end. prepare: imports the
    modules that these need, and returns the steps that are done ahead of time while nobody asks."""
    getproctitle()  # finds the place of the title, while the environment beside it is as it was
    supervisor = socket.socket(fileno=os.dup(ORDERS))
    gc.disable()  # nothing of what is imported becomes garbage
    module = Forks(supervisor, deque(prepare())).serve()
    if module is not None:
        run_child(importlib.import_module(module).main)


def prepare() -> Iterable[Callable[[], object]]:
    """Imports the modules that any engine needs, and returns the further steps that may be done ahead of
    time."""
    from kvloom.serve.engine import ahead  # noqa: PLC0415 -- for seconds, because it imports torch

    return ahead()


if __name__ == "__main__":
    serve_forks(prepare)
