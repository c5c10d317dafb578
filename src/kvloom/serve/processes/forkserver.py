"""Starts engines by forking them from a process that has imported what they need.

A new interpreter imports torch and transformers for seconds before an engine can load anything; a forked
process has them already, and shares their memory. The fork server holds no model and has a single thread, so
that its forks are as good as new interpreters (`forkserver_process.py`). It is the parent of the processes
that it forks, and tells how they have ended. If it dies they live on, processes start as new interpreters,
and another fork server is started.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from typing import IO, Final

import msgspec
from msgspec import Struct

from kvloom.serve.processes.child import ChildProcess, Descriptors, lines, reader
from kvloom.serve.processes.prefork import ENVIRONMENT, NAME, LaunchedForkServer, launch
from kvloom.types.clock import Clock, ending

FORK_SECONDS: Final = 10.0  # for an answer
IMPORT_SECONDS: Final = 40.0  # for the first answer, from the fork server's start on: a slow disk's imports
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before another fork server is started, doubled each time
HEALTHY_SECONDS: Final = 60.0  # after such a life the first pause is enough again
STEP_SECONDS: Final = 120.0  # for one of the things that it does ahead of time
TOLD_SECONDS: Final = 2.0  # for the fork server to tell how a process has ended that has
LONGEST_MESSAGE: Final = 1 << 17


class Fork(Struct, frozen=True):
    """Asks for a process that runs `module`. The descriptors of its orders, its output and its reports come
    with the message."""

    module: str
    name: str
    environment: dict[str, str]


class Forked(Struct, frozen=True, tag="forked"):
    """Answers `Fork`; the process's pidfd comes with the message."""

    pid: int


class ForkRefused(Struct, frozen=True, tag="refused"):
    """Answers `Fork`: no process was forked."""

    why: str


class ForkEnded(Struct, frozen=True, tag="ended"):
    """Tells that a process has ended. `code` is as subprocess gives it."""

    pid: int
    code: int


class WorksAhead(Struct, frozen=True, tag="ahead"):
    """Tells that the fork server begins something that it does ahead of time while nobody asks, or has done
    it."""

    done: bool


class NotForked(Exception):
    """No process was forked; its text tells why."""


class ForkedProcess:
    """A process that the fork server has forked. Satisfies `StartedProcess`."""

    def __init__(self, pid: int, handle: int) -> None:
        """Takes over `handle`, the process's pidfd."""
        self.pid = pid
        self.returncode: int | None = None
        self._handle = handle
        self._ended = asyncio.Event()

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def end(self, code: int) -> None:
        """Notes that the process has ended."""
        if not self._ended.is_set():
            self.returncode = code
            self._close()

    def watch(self, told: float = 0.0) -> None:
        """Waits for the end by the pidfd. told: seconds for which the fork server has time to tell how the
        process has ended; it may hang, or be busy."""
        if not self._ended.is_set():
            asyncio.get_running_loop().add_reader(self._handle, self._gone, told)

    def _gone(self, told: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._handle)
        loop.call_later(told, self._close)

    def _close(self) -> None:
        if not self._ended.is_set():
            asyncio.get_running_loop().remove_reader(self._handle)
            os.close(self._handle)
            self._ended.set()

    def _signal(self, number: signal.Signals) -> None:
        if not self._ended.is_set():
            with suppress(ProcessLookupError):  # it has ended, and `end` is on its way
                signal.pidfd_send_signal(self._handle, number)


class _Channel:
    """The connection to one fork server, which answers in the order in which it is asked."""

    def __init__(self, connection: socket.socket, clock: Clock) -> None:
        """Takes over this end of the connection."""
        self._connection = connection
        self.working_since: float | None = None
        """When the fork server began something that it does ahead of time; None if it does nothing."""
        self._clock = clock
        self._decoder = msgspec.json.Decoder(Forked | ForkRefused | ForkEnded | WorksAhead)
        self._asked: deque[asyncio.Future[ForkedProcess]] = deque()
        self._processes: dict[int, ForkedProcess] = {}
        connection.setblocking(False)
        asyncio.get_running_loop().add_reader(connection, self._hear)

    async def fork(self, request: Fork, descriptors: list[int]) -> ForkedProcess:
        """Raises NotForked, and OSError if nobody listens."""
        socket.send_fds(self._connection, [msgspec.json.encode(request)], descriptors)
        answer: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        return await answer

    def close(self) -> None:
        """Refuses what is not answered yet; the ends of processes are found out without the fork server."""
        asyncio.get_running_loop().remove_reader(self._connection)
        self._connection.close()
        for answer in self._asked:
            if not answer.done():
                answer.set_exception(NotForked("it has ended"))
        for process in self._processes.values():
            process.watch()
        self._asked.clear()
        self._processes.clear()

    def _hear(self) -> None:
        try:
            message, handles, _, _ = socket.recv_fds(
                self._connection, LONGEST_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except ConnectionError:
            message, handles = b"", []
        if not message:  # it has ended, which its process tells too
            asyncio.get_running_loop().remove_reader(self._connection)
            return
        match self._decoder.decode(message):
            case Forked(pid):
                self._forked(ForkedProcess(pid, handles[0]))
            case ForkRefused(why):
                answer = self._asked.popleft()
                if not answer.done():
                    answer.set_exception(NotForked(why))
            case ForkEnded(pid, code):
                self._processes.pop(pid).end(code)
            case WorksAhead(done):
                self.working_since = None if done else self._clock.now()

    def _forked(self, process: ForkedProcess) -> None:
        self._processes[process.pid] = process
        process.watch(TOLD_SECONDS)
        answer = self._asked.popleft()
        if answer.done():  # nobody waits for it any more
            process.kill()
        else:
            answer.set_result(process)


class ForkServer:
    """Keeps a fork server alive while `run` runs, and starts processes with its help."""

    def __init__(
        self,
        modules: Collection[str],
        clock: Clock,
        log: Callable[[str, str], None],
        pause: float = FIRST_PAUSE,
        *,
        first: LaunchedForkServer | None = None,
        launch: Callable[[], LaunchedForkServer] = launch,
    ) -> None:
        """modules: the modules that are forked, each with a `main` that takes its `Parent`; log: takes a name
        and a line; pause: seconds before a second fork server is launched; first: the first one, if it was
        launched already."""
        self._modules = modules
        self._clock = clock
        self._log = log
        self._pause = pause
        self._first = first
        self._launch = launch
        self._began = clock.now()
        self._over = False
        self._channel: _Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Returns the fork server's process, while there is one."""
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Runs until it is cancelled, and ends the fork server then. From then on nothing is started."""
        pause = 0.0
        try:
            while True:
                self._began = self._clock.now()
                try:
                    how = await self._live()
                except* OSError as errors:
                    first = errors.exceptions[0]
                    how = f"cannot be started: {first.strerror if isinstance(first, OSError) else first}"
                healthy = self._clock.now() - self._began >= HEALTHY_SECONDS
                pause = self._pause if healthy else min(max(self._pause, 2 * pause), LONGEST_PAUSE)
                self._log(NAME, f"{how}; it starts again in {pause:g} s; engines start without it meanwhile")
                await self._clock.sleep(pause)
        finally:
            self._over = True

    async def start(self, name: str, module: str, inherit: Sequence[int] = ()) -> ChildProcess:
        """Forks a process, or starts it as a new interpreter if it cannot be forked. Raises OSError."""
        if self._channel is not None and module in self._modules and not inherit:
            try:
                return await ChildProcess.start(name, module, spawn=self._fork)
            except (NotForked, OSError) as error:
                if not self._over:
                    self._log(name, f"starts without the fork server: {error}")
        if self._over:
            raise OSError(errno.ECANCELED, "the fleet ends")
        return await ChildProcess.start(name, module, inherit)  # with other pipes than a stray fork's

    async def _fork(self, module: str, name: str, given: Descriptors) -> ForkedProcess:
        """Satisfies `Spawn`. Raises NotForked, too. A fork server that does not answer is killed, so that
        another one takes its place, unless it does something ahead of time, which it is given its time
        for."""
        channel, process = self._channel, self._process
        if channel is None:
            raise NotForked("it has ended")
        seconds = max(FORK_SECONDS, self._began + IMPORT_SECONDS - self._clock.now())
        request = Fork(module, name, os.environ | ENVIRONMENT)
        try:
            async with asyncio.timeout(seconds):
                return await channel.fork(request, [given.orders, given.output, given.reports])
        except TimeoutError:
            since = channel.working_since
            if since is not None and self._clock.now() - since < STEP_SECONDS:
                raise NotForked("it does something else ahead of time") from None
            if process is not None:
                process.kill()
            raise NotForked(f"it gave no answer in {seconds:.3g} s") from None

    async def _live(self) -> str:
        """Lets one fork server live from its start to its end. Returns how the end came. Raises OSError if it
        cannot be started."""
        server, self._first = self._first or self._launch(), None
        try:
            self._process, self._channel = server.process, _Channel(server.connection, self._clock)
            async with asyncio.TaskGroup() as group:
                assert server.process.stdout is not None
                group.create_task(self._show(server.process.stdout))
                return ending(await _ended(server.process))
        finally:
            self._over = server.process.returncode is None
            if self._channel is not None:
                self._channel.close()
            self._channel, self._process = None, None
            server.end()

    async def _show(self, output: IO[bytes]) -> None:
        with ExitStack() as ends:
            async for line in lines(await reader(output, ends)):
                self._log(NAME, line)


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """Waits for the end of a process, and returns its exit status."""
    loop, over, handle = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(process.pid)
    loop.add_reader(handle, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    return process.wait()
