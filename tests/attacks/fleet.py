"""A real fleet of two units, and an innocent client that keeps asking while something else happens."""

from __future__ import annotations

import asyncio
import json
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
class Seen:
    """What an innocent client has seen."""

    seconds: list[float] = field(default_factory=list)
    """How long each answer took."""
    gap: float = 0.0
    """The longest time between two pieces of one answer."""
    wrong: list[str] = field(default_factory=list)
    """Answers that were refused, cut short, or another text than the first one."""

    def p99(self) -> float:
        """Returns the 99th percentile of the answers' seconds; infinity without an answer."""
        return sorted(self.seconds)[int(0.99 * len(self.seconds))] if self.seconds else float("inf")


@asynccontextmanager
async def innocent(fleet: Fleet, model: str) -> AsyncIterator[Seen]:
    """Lets a client ask while the block runs; if the fleet has keys, with one named `innocent`. It is a
    process of its own, lest the attacker's work holds up its clock. What it has seen is told when the block
    ends, but for the time in which it warms up; the block begins when it has done so."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.attacks.innocent", fleet.url, model),
        *fleet.headers("innocent").values(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    seen = Seen()
    try:
        await process.stdout.readline()
        yield seen
    finally:
        told, _ = await process.communicate(b"")  # the end of its input ends it
        seen.seconds, seen.gap, seen.wrong = json.loads(told)


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
