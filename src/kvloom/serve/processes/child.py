"""A process, as the supervisor that started it sees it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import IO, Final, Protocol, Self

import msgspec

from kvloom.serve.processes.messages import ChildReport, Order
from kvloom.serve.processes.prefork import ENVIRONMENT
from kvloom.types.clock import ending

_log = logging.getLogger(__name__)
LONGEST_LINE: Final = 1 << 16
LONGEST_REPORT: Final = 1 << 23  # of a unit that an admin has described in as many bytes as may be
LINE_END: Final = re.compile(rb"\r\n|\n|\r")  # a lone return ends a state of a progress bar
REST_SECONDS: Final = 1.0  # for what a process that has ended has said


@dataclass(frozen=True, slots=True)
class Descriptors:
    """The descriptors that a new process is given. `spawn` leaves them open."""

    orders: int
    """The process's stdin."""

    output: int
    """The process's stdout and stderr."""

    reports: int
    """The pipe whose number is the process's first argument."""

    inherit: tuple[int, ...] = ()
    """Further descriptors, which have the same numbers in the process."""


class StartedProcess(Protocol):
    """A process that was started here."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int | None:
        """Waits for the end. Returns the exit status as subprocess gives it, None if nobody knows it."""

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class Spawn(Protocol):
    """Starts `python -m MODULE REPORTS NAME`, in a process group of its own. Raises OSError."""

    async def __call__(self, module: str, name: str, given: Descriptors) -> StartedProcess: ...


async def execute(module: str, name: str, given: Descriptors) -> StartedProcess:
    """Starts the process as a new interpreter."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # whatever lies in the current folder is not to be imported
        "-m",
        module,
        str(given.reports),
        name,  # for whoever lists processes
        stdin=given.orders,
        stdout=given.output,
        stderr=asyncio.subprocess.STDOUT,
        pass_fds=(given.reports, *given.inherit),
        process_group=0,  # keeps a terminal's Ctrl-C for the supervisor alone
        env=os.environ | ENVIRONMENT,
    )


class ChildProcess:
    """A process that this one has started. It ends when it is told to, and when this one ends."""

    def __init__(
        self,
        name: str,
        process: StartedProcess,
        pipes: ExitStack,
        orders: asyncio.StreamWriter,
        output: asyncio.StreamReader,
        reports: asyncio.StreamReader,
    ) -> None:
        """pipes: closes the ends of pipes that the streams use."""
        self.name = name
        self._process = process
        self._pipes = pipes
        self._orders = orders
        self._output = output
        self._reports = reports

    @classmethod
    async def start(cls, name: str, module: str, inherit: Sequence[int] = (), spawn: Spawn = execute) -> Self:
        """Starts `module` as a process of its own. Raises the errors of `spawn`, and OSError."""
        with ExitStack() as ours, ExitStack() as theirs:
            orders, order = _pipe(theirs, ours)
            output, out = _pipe(ours, theirs)
            reports, report = _pipe(ours, theirs)
            streams = (
                await _writer(order, ours),
                await reader(output, ours),
                await reader(reports, ours, LONGEST_REPORT),
            )
            given = Descriptors(orders.fileno(), out.fileno(), report.fileno(), tuple(inherit))
            process = await spawn(module, name, given)
            return cls(name, process, ours.pop_all(), *streams)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def order(self, *orders: Order) -> None:
        with suppress(ConnectionError):  # it has ended, which `reports` and `ended` tell
            self._orders.writelines(msgspec.json.encode(order) + b"\n" for order in orders)
            await self._orders.drain()

    async def reports(self) -> AsyncIterator[ChildReport]:
        """Yields reports until the process ends. A process whose line is no report, or is too long, is
        killed."""
        decoder = msgspec.json.Decoder(ChildReport)
        try:
            async for line in self._reports:
                if line.endswith(b"\n"):  # else it has died over it
                    yield decoder.decode(line)
        except (msgspec.MsgspecError, ValueError) as error:
            _log.error("%s is killed: what it reported cannot be read: %s", self.name, error)
            self.kill()

    def logs(self) -> AsyncIterator[str]:
        """Yields the process's output line by line; a line without end comes in pieces."""
        return lines(self._output)

    async def ended(self) -> str:
        """Waits for the process's end, and returns in words how it ended. Its reports and its output end soon
        after it, though a process that it has left behind may hold its pipes."""
        code = await self._process.wait()
        asyncio.get_running_loop().call_later(REST_SECONDS, self._pipes.close)
        return "has ended" if code is None else ending(code)

    def terminate(self) -> None:
        """Tells the process to finish what it does, and to end."""
        if self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


async def lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yields a stream line by line; a line without end comes in pieces."""
    rest = b""
    while piece := await stream.read(LONGEST_LINE):
        *whole, rest = LINE_END.split(rest + piece)
        if len(rest) > LONGEST_LINE:
            whole, rest = [*whole, rest], b""
        for line in filter(None, whole):
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def _pipe(reading: ExitStack, writing: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Returns both ends of a new pipe, which the stacks close."""
    read, write = os.pipe()
    return reading.enter_context(os.fdopen(read, "rb")), writing.enter_context(os.fdopen(write, "wb"))


async def reader(pipe: IO[bytes], ends: ExitStack, limit: int = LONGEST_LINE) -> asyncio.StreamReader:
    """Returns a pipe's end to read from, which is closed with the last byte, or by `ends`."""
    stream = asyncio.StreamReader(limit=limit)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), pipe
    )
    ends.callback(transport.close)
    return stream


async def _writer(pipe: IO[bytes], ends: ExitStack) -> asyncio.StreamWriter:
    """Returns a pipe's end to write to, which is closed once nobody reads it, or by `ends`."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, pipe)
    ends.callback(lambda: None if transport.is_closing() else transport.abort())
    return asyncio.StreamWriter(transport, protocol, None, loop)
