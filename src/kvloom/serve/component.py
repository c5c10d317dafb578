"""A process, as the supervisor that started it sees it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Self

import msgspec

from kvloom.serve.orders import Order, Report
from kvloom.types.clock import ending

_log = logging.getLogger(__name__)
LONGEST_LINE = 1 << 16
LONGEST_REPORT = 1 << 22  # of a unit that an admin has described in as many bytes as may be
LINE_END = re.compile(rb"\r\n|\n|\r")  # a lone return ends a state of a progress bar
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "TQDM_MININTERVAL": "3"}


class Component:
    """Lives until it is told to end, or until this process has ended."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, reports: asyncio.StreamReader) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.name = name
        self._process = process
        self._orders = process.stdin
        self._output = process.stdout
        self._reports = reports

    @classmethod
    async def start(cls, name: str, module: str, inherit: Sequence[int] = ()) -> Self:
        """A process group of its own keeps a terminal's Ctrl-C for the supervisor alone."""
        read, write = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # whatever lies in the current folder is not to be imported
                "-m",
                module,
                str(write),
                name,  # for whoever lists processes
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(write, *inherit),
                process_group=0,
                env=os.environ | ENVIRONMENT,
            )
        finally:
            os.close(write)
        reader = asyncio.StreamReader(limit=LONGEST_REPORT)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb")
        )
        return cls(name, process, reader)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def order(self, *orders: Order) -> None:
        with suppress(ConnectionError):  # it has ended, which `reports` and `ended` tell
            self._orders.writelines(msgspec.json.encode(order) + b"\n" for order in orders)
            await self._orders.drain()

    async def reports(self) -> AsyncIterator[Report]:
        """Until the process ends. One that says what is no report, or too long a one, is killed for it."""
        decoder = msgspec.json.Decoder(Report)
        try:
            async for line in self._reports:
                if line.endswith(b"\n"):  # else it has died over it
                    yield decoder.decode(line)
        except (msgspec.MsgspecError, ValueError) as error:
            _log.error("%s is killed: what it reported cannot be read: %s", self.name, error)
            self.kill()

    async def logs(self) -> AsyncIterator[str]:
        """What it prints, line by line; a line without end comes in pieces."""
        rest = b""
        while piece := await self._output.read(LONGEST_LINE):
            *lines, rest = LINE_END.split(rest + piece)
            if len(rest) > LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in filter(None, lines):
                yield line.decode(errors="replace")
        if rest:
            yield rest.decode(errors="replace")

    async def ended(self) -> str:
        """Wait for its end; how it came, in words."""
        return ending(await self._process.wait())

    def terminate(self) -> None:
        """It is to finish what it does, and to end."""
        if self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
