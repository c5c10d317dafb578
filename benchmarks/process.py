"""A server as a child process: started, waited for, and ended with all of its own children."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

POLL_SECONDS = 0.1
END_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Command:
    """How to start a server. health: the URL that answers 200 once it is ready; log: where its words go."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    health: str
    log: Path


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers. start_seconds: from its start to the first answer."""

    pid: int
    start_seconds: float


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@asynccontextmanager
async def running(command: Command, *, patience: float) -> AsyncIterator[Running]:
    """The server, in a session of its own, until the block ends, be it by a SIGTERM. Raises RuntimeError
    with the log's last lines where it ends early or does not answer within `patience` seconds."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    command.log.parent.mkdir(parents=True, exist_ok=True)
    with command.log.open("wb") as log:
        started = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *command.argv,
            env={**os.environ, **command.env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        await _ready(command, process, started + patience)
        yield Running(process.pid, time.perf_counter() - started)
    finally:
        await _end(process)


async def _ready(command: Command, process: asyncio.subprocess.Process, deadline: float) -> None:
    timeout = aiohttp.ClientTimeout(total=5)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while time.perf_counter() < deadline:
            if process.returncode is not None:
                raise RuntimeError(f"{command.name} ended with {process.returncode}:\n{_tail(command.log)}")
            try:
                async with session.get(command.health) as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, ConnectionError, TimeoutError):
                pass
            await asyncio.sleep(POLL_SECONDS)
    raise RuntimeError(f"{command.name} did not answer in time:\n{_tail(command.log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-20:])


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask the server to end; then make sure of it and of all that it started."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
