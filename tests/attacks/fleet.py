"""A real fleet of two units, and an innocent client that keeps asking while something else happens."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
from benchmarks.process import free_port
from benchmarks.procfs import PROC, command_line, descendants, peak_memory

from kvloom.config.config import DEMO
from kvloom.config.keys import add_key, make_key

CONFIG: Final = """\
port: {port}
kv_memory: 64MiB
models:
  sums: {demo}/sums
  guide: {demo}/guide
units:
  - {{models: [sums, guide]}}
  - {{models: [sums, guide]}}
{more}"""
READY_SECONDS: Final = 60.0
INNOCENT_ADDRESS: Final = "127.0.0.2"
"""Attackers come from 127.0.0.1: without keys, it is addresses that are served in turn."""


@dataclass(slots=True)
class Fleet:
    """A fleet that serves."""

    url: str
    port: int
    pid: int
    folder: Path
    """Its config's folder, from which programs are loaded."""
    keys: dict[str, str]
    """Its keys by their names; none if it has none."""
    restarted: set[str] = field(default_factory=set)
    """Processes that the attack has let be restarted, as an administrator may."""

    def headers(self, name: str) -> dict[str, str]:
        """Returns what a client with a key sends besides; nothing if no such key was made."""
        return {"authorization": f"Bearer {self.keys[name]}"} if name in self.keys else {}

    def processes(self) -> dict[str, int]:
        """Returns the fleet's processes by what they are, but for workers, which may come and go."""
        found = {"supervisor": self.pid}
        for pid in descendants(self.pid):
            with suppress(OSError):
                line = command_line(pid)
                if "sandbox_process" not in line and (named := re.search(r"serve\.(\w+) \d+ (\S+)", line)):
                    found[f"{named[1]} {named[2]}"] = pid
        return found

    def gateway(self) -> int:
        """Returns the gateway's process."""
        return next(pid for name, pid in self.processes().items() if name.startswith("gateway_process"))

    def engines(self) -> list[int]:
        """Returns the engines' processes."""
        return [pid for name, pid in self.processes().items() if name.startswith("engine_process")]


@asynccontextmanager
async def serving(
    *, more: str = "", keys: Sequence[str] = (), output: int | None = None
) -> AsyncIterator[Fleet]:
    """Serves the demo models. more: further lines of the config; keys: the names of its keys, without which
    it needs none; output: the descriptor to which the fleet prints, in place of a pipe that is read."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        made = {name: make_key(name) for name in keys}
        for _, key in made.values():
            add_key(Path(folder) / "keys.yaml", key)
        more += "keys: keys.yaml\n" if made else ""
        config = Path(folder) / "fleet.yaml"
        config.write_text(CONFIG.format(port=port, demo=DEMO, more=more))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvloom.cli", "serve", str(config)),
            stdout=asyncio.subprocess.PIPE if output is None else output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            await _answers(url)
            async with asyncio.TaskGroup() as group:
                reading = None if process.stdout is None else group.create_task(_drain(process.stdout))
                texts = {name: text for name, (text, _) in made.items()}
                yield Fleet(url, port, process.pid, Path(folder), texts)
                if reading is not None:
                    reading.cancel()
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                with suppress(TimeoutError):
                    async with asyncio.timeout(15):
                        await process.wait()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass


async def _answers(url: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    async with aiohttp.ClientSession() as session:
        while True:
            with suppress(aiohttp.ClientError, ConnectionError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            if time.monotonic() > deadline:
                raise RuntimeError("the fleet did not answer in time")
            await asyncio.sleep(0.1)


@dataclass(slots=True)
class Innocent:
    """A client of one model, at another address than the attackers, that asks one short question after the
    other, each as a stream."""

    url: str
    model: str
    headers: dict[str, str]
    """Those that bring its key, if the fleet has keys."""
    seconds: list[float] = field(default_factory=list)
    """How long each answer took."""
    gap: float = 0.0
    """The longest time between two pieces of one answer."""
    wrong: list[str] = field(default_factory=list)
    """Answers that were refused, cut short, or another text than the first one."""

    async def ask_for_ever(self) -> None:
        first: str | None = None
        connector = aiohttp.TCPConnector(local_addr=(INNOCENT_ADDRESS, 0))
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            while True:
                begun = time.monotonic()
                try:
                    text = await self._ask(session)
                except (aiohttp.ClientError, TimeoutError, ConnectionError, ValueError) as error:
                    self.wrong.append(f"{type(error).__name__}: {error}"[:200])
                    await asyncio.sleep(0.1)
                    continue
                self.seconds.append(time.monotonic() - begun)
                first = first or text
                if text != first:
                    self.wrong.append(text[:200])
                await asyncio.sleep(0.05)

    async def _ask(self, session: aiohttp.ClientSession) -> str:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": "What is 17 + 25?"}],
            "temperature": 0,
            "max_tokens": 12,
            "stream": True,
        }
        pieces: list[bytes] = []
        async with session.post(
            f"{self.url}/v1/chat/completions", json=body, headers=self.headers
        ) as response:
            if response.status != 200:
                raise ValueError(f"{response.status}: {await response.text()}")
            last = None
            async for data in response.content.iter_any():
                now = time.monotonic()
                if last is not None:
                    self.gap = max(self.gap, now - last)
                last = now
                pieces.append(data)
        stream = b"".join(pieces)
        if b"data: [DONE]" not in stream:
            raise ValueError(f"cut short: {stream[-200:]!r}")
        return "".join(re.findall(r'"content":"((?:[^"\\]|\\.)*)"', stream.decode()))

    def p99(self) -> float:
        """Returns the 99th percentile of the answers' seconds; infinity without an answer."""
        return sorted(self.seconds)[int(0.99 * len(self.seconds))] if self.seconds else float("inf")


@asynccontextmanager
async def innocent(fleet: Fleet, model: str) -> AsyncIterator[Innocent]:
    """Lets a client ask while the block runs; if the fleet has keys, with one named `innocent`."""
    client = Innocent(fleet.url, model, fleet.headers("innocent"))
    task = asyncio.create_task(client.ask_for_ever())
    try:
        yield client
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def resident(pid: int) -> float:
    """Returns the most MiB that a process has had."""
    return peak_memory(pid)


def forget_peak(pid: int) -> None:
    """Lets the kernel measure a process's peak of memory anew."""
    (PROC / str(pid) / "clear_refs").write_text("5")


async def post(
    session: aiohttp.ClientSession, url: str, body: Any, headers: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Returns the status and the text of an answer."""
    async with session.post(url, json=body, headers=headers) as response:
        return response.status, await response.text()
