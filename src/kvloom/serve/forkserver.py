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
import sys
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Struct

from kvloom.serve.component import ENVIRONMENT, ComponentProcess, Descriptors, execute, lines, reader
from kvloom.serve.parent import ORDERS
from kvloom.types.clock import Clock, ending

NAME: Final = "forkserver"
MODULE: Final = "kvloom.serve.forkserver_process"
SINGLE_THREADED: Final = {"OPENBLAS_NUM_THREADS": "1"}  # numpy's library starts its threads when it is loaded
FORK_SECONDS: Final = 60.0  # a slow disk's imports included
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before another fork server is started, doubled each time
HEALTHY_SECONDS: Final = 60.0  # after such a life the first pause is enough again
TOLD_SECONDS: Final = 0.5  # for the fork server to tell how a process has ended that has
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


class NotForked(Exception):
    """No process was forked; its text tells why."""


class ForkedProcess:
    """A process that the fork server has forked. Satisfies `ComponentProcess`."""

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

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._decoder = msgspec.json.Decoder(Forked | ForkRefused | ForkEnded)
        self._asked: deque[asyncio.Future[ForkedProcess]] = deque()
        self._processes: dict[int, ForkedProcess] = {}
        self.ours.setblocking(False)
        asyncio.get_running_loop().add_reader(self.ours, self._hear)

    async def fork(self, request: Fork, descriptors: list[int]) -> ForkedProcess:
        """Raises NotForked, and OSError if nobody listens."""
        socket.send_fds(self.ours, [msgspec.json.encode(request)], descriptors)
        answer: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        return await answer

    def close(self) -> None:
        """Refuses what is not answered yet; the ends of processes are found out without the fork server."""
        asyncio.get_running_loop().remove_reader(self.ours)
        self.ours.close()
        self.theirs.close()
        for answer in self._asked:
            if not answer.done():
                answer.set_exception(NotForked("it has ended"))
        for process in self._processes.values():
            process.watch()
        self._asked.clear()
        self._processes.clear()

    def _hear(self) -> None:
        try:
            message, handles, _, _ = socket.recv_fds(self.ours, LONGEST_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except ConnectionError:
            message, handles = b"", []
        if not message:  # it has ended, which its process tells too
            asyncio.get_running_loop().remove_reader(self.ours)
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

    def _forked(self, process: ForkedProcess) -> None:
        self._processes[process.pid] = process
        process.watch(TOLD_SECONDS)
        answer = self._asked.popleft()
        if answer.done():  # nobody waits for it any more
            process.kill()
        else:
            answer.set_result(process)


class ForkServer:
    """Keeps a fork server alive while `run` runs, and starts processes with its help; `spawn` satisfies
    `Spawn`."""

    def __init__(
        self,
        modules: Collection[str],
        clock: Clock,
        log: Callable[[str, str], None],
        pause: float = FIRST_PAUSE,
        server: str = MODULE,
    ) -> None:
        """modules: the modules that are forked, each with a `main` that takes its `Parent`; log: takes a name
        and a line; pause: seconds before a second fork server is started; server: the module that it runs."""
        self._modules = modules
        self._clock = clock
        self._log = log
        self._pause = pause
        self._over = False
        self._server = server
        self._channel: _Channel | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Returns the fork server's process, while there is one."""
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Runs until it is cancelled, and ends the fork server then. From then on nothing is started."""
        pause = 0.0
        try:
            while True:
                began = self._clock.now()
                how = await self._live()
                healthy = self._clock.now() - began >= HEALTHY_SECONDS
                pause = self._pause if healthy else min(max(self._pause, 2 * pause), LONGEST_PAUSE)
                self._log(NAME, f"{how}; it starts again in {pause:g} s; engines start without it meanwhile")
                await self._clock.sleep(pause)
        finally:
            self._over = True
            self._close()

    async def spawn(self, module: str, name: str, given: Descriptors) -> ComponentProcess:
        """Forks the process, or starts it as a new interpreter if it cannot be forked. Raises OSError."""
        if self._channel is not None and module in self._modules and not given.inherit:
            request = Fork(module, name, os.environ | ENVIRONMENT)
            try:
                async with asyncio.timeout(FORK_SECONDS):
                    return await self._channel.fork(request, [given.orders, given.output, given.reports])
            except TimeoutError:
                if self._process is not None and self._process.returncode is None:
                    self._process.kill()
                self._log(name, f"starts without the fork server: it gave no answer in {FORK_SECONDS:g} s")
            except (NotForked, OSError) as error:
                if not self._over:
                    self._log(name, f"starts without the fork server: {error}")
        if self._over:
            raise OSError(errno.ECANCELED, "the fleet ends")
        return await execute(module, name, given)

    def _close(self) -> None:
        channel, self._channel, self._process = self._channel, None, None
        if channel is not None:
            channel.close()

    async def _live(self) -> str:
        """Lets one fork server live from its start to its end. Returns how the end came."""
        channel = self._channel = _Channel()  # at once, so that what starts beside it waits for its answer
        try:
            process, output = await self._start(channel)
        except OSError as error:
            self._close()
            return f"cannot be started: {error.strerror}"
        self._process = process
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._show(output))
                return ending(await process.wait())
        finally:
            self._over = process.returncode is None
            self._close()
            if self._over:
                process.kill()
                await process.wait()

    async def _start(self, channel: _Channel) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader]:
        read, write = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                self._server,
                str(ORDERS),
                NAME,
                stdin=channel.theirs.fileno(),
                stdout=write,
                stderr=asyncio.subprocess.STDOUT,
                process_group=0,
                env=os.environ | ENVIRONMENT | SINGLE_THREADED,
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        channel.theirs.close()
        return process, await reader(read)

    async def _show(self, output: asyncio.StreamReader) -> None:
        async for line in lines(output):
            self._log(NAME, line)
