"""A process, as the supervisor that started it sees it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol, Self

import msgspec

from kvloom.serve.orders import Order, Report
from kvloom.types.clock import ending

_log = logging.getLogger(__name__)
LONGEST_LINE: Final = 1 << 16
LONGEST_REPORT: Final = 1 << 22  # of a unit that an admin has described in as many bytes as may be
LINE_END: Final = re.compile(rb"\r\n|\n|\r")  # a lone return ends a state of a progress bar
ENVIRONMENT: Final = {"PYTHONUNBUFFERED": "1", "TQDM_MININTERVAL": "3"}


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


class ComponentProcess(Protocol):
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

    async def __call__(self, module: str, name: str, given: Descriptors) -> ComponentProcess: ...


async def execute(module: str, name: str, given: Descriptors) -> ComponentProcess:
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


class Component:
    """Lives until it is told to end, or until this process has ended."""

    def __init__(
        self,
        name: str,
        process: ComponentProcess,
        orders: asyncio.StreamWriter,
        output: asyncio.StreamReader,
        reports: asyncio.StreamReader,
    ) -> None:
        self.name = name
        self._process = process
        self._orders = orders
        self._output = output
        self._reports = reports

    @classmethod
    async def start(cls, name: str, module: str, inherit: Sequence[int] = (), spawn: Spawn = execute) -> Self:
        """Starts `module` as a process of its own. Raises OSError."""
        (orders, order), (output, out), (reports, report) = os.pipe(), os.pipe(), os.pipe()
        try:
            process = await spawn(module, name, Descriptors(orders, out, report, tuple(inherit)))
        except BaseException:
            for end in (order, output, reports):
                os.close(end)
            raise
        finally:
            for end in (orders, out, report):
                os.close(end)
        writer = await _writer(order)
        return cls(name, process, writer, await reader(output), await reader(reports, LONGEST_REPORT))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def order(self, *orders: Order) -> None:
        with suppress(ConnectionError):  # it has ended, which `reports` and `ended` tell
            self._orders.writelines(msgspec.json.encode(order) + b"\n" for order in orders)
            await self._orders.drain()

    async def reports(self) -> AsyncIterator[Report]:
        """Yields reports until the process ends. A process whose line is no report, or is too long, is
        killed."""
        decoder = msgspec.json.Decoder(Report)
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
        """Waits for the process's end, and returns how it came, in words."""
        code = await self._process.wait()
        return "has ended" if code is None else ending(code)

    def terminate(self) -> None:
        """Tells the process to finish what it does, and to end."""
        if self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


async def lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yields what comes line by line; a line without end comes in pieces."""
    rest = b""
    while piece := await stream.read(LONGEST_LINE):
        *whole, rest = LINE_END.split(rest + piece)
        if len(rest) > LONGEST_LINE:
            whole, rest = [*whole, rest], b""
        for line in filter(None, whole):
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


async def reader(descriptor: int, limit: int = LONGEST_LINE) -> asyncio.StreamReader:
    """Returns a pipe's end to read from, which it closes with the last byte."""
    stream = asyncio.StreamReader(limit=limit)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb")
    )
    return stream


async def _writer(descriptor: int) -> asyncio.StreamWriter:
    """Returns a pipe's end to write to, which is closed once nobody reads it."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(descriptor, "wb")
    )
    return asyncio.StreamWriter(transport, protocol, None, loop)
