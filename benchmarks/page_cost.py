"""What open pages cost a gateway: 20 that listen to a fleet of 64 units, against none.

python -m benchmarks.page_cost. Four processes: the real gateway, 64 engines over a device that takes no time,
a client with streams, and one that holds the pages open. With and without them in turn, at one gateway. A
page is what it asks for: the samples of `/admin/live` and the journal of `/admin/events`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median

import aiohttp
from rich.console import Console

from benchmarks.null_engine import Shape
from benchmarks.procfs import cpu_seconds, resident_memory
from benchmarks.report import Finding, Report, make_parser, publish, this_machine
from benchmarks.streaming import Front, client, front

MOST_CORE, MOST_MIB, MOST_SLOWER = 0.05, 20.0, 0.03
PATHS = ("/admin/live", "/admin/events")


@dataclass(frozen=True, slots=True)
class Effort:
    """turns: with pages, and as many without. streams: at once, with `tokens` each, at `pace` a second in
    all."""

    turns: int = 5
    units: int = 64
    models: int = 2
    pages: int = 20
    streams: int = 16
    tokens: int = 400
    pace: float = 400.0


@dataclass(frozen=True, slots=True)
class Turn:
    """pages: that were open. core: the gateway's CPU seconds a second. per_token: seconds. memory: MiB that
    the gateway has resident at its end. samples, size: events that each page got, and MiB of all pages."""

    pages: int
    core: float
    per_token: float
    memory: float
    samples: float = 0.0
    size: float = 0.0


async def turn(here: Front, effort: Effort, pages: int) -> Turn:
    argv = ["--url", here.url, "--model", "m", "--stream", "--requests", str(effort.streams)]
    async with watched(here.url, pages) as seen:
        before, began = cpu_seconds(here.gateway_pid), asyncio.get_running_loop().time()
        told = await client([*argv, "--output", str(effort.tokens)])
        seconds = asyncio.get_running_loop().time() - began
        core = (cpu_seconds(here.gateway_pid) - before) / seconds
        memory = resident_memory(here.gateway_pid)
    samples, size = (seen["samples"] / pages, seen["bytes"] / (1 << 20)) if pages else (0.0, 0.0)
    return Turn(pages, core, told["tpot"], memory, samples, size)


@asynccontextmanager
async def watched(url: str, pages: int) -> AsyncIterator[dict[str, float]]:
    """Holds pages open, in a process of its own. Gives what they got, once the block is over."""
    seen: dict[str, float] = {}
    if not pages:
        yield seen
        return
    argv = ["-m", "benchmarks.page_cost", "--watch", url, "--pages", str(pages)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    try:
        if await process.stdout.readline() != b"open\n":
            raise RuntimeError("the pages could not be opened")
        yield seen
    finally:
        assert process.stdin is not None
        process.stdin.close()  # which ends it
        output, _ = await process.communicate()
    seen |= json.loads(output)


async def watch(url: str, pages: int) -> None:
    """Reads as pages do, until the input ends, and prints what came."""
    counts = {"samples": 0, "bytes": 0}
    opened = asyncio.Semaphore(0)

    async def read(session: aiohttp.ClientSession, path: str) -> None:
        async with session.get(url + path) as answer:
            answer.raise_for_status()
            opened.release()
            async for data in answer.content.iter_any():
                counts["samples"] += data.count(b"event: sample")
                counts["bytes"] += len(data)

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        asyncio.TaskGroup() as tasks,
    ):
        reading = [tasks.create_task(read(session, path)) for path in PATHS for _ in range(pages)]
        for _ in reading:
            await opened.acquire()
        print("open", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for one in reading:
            one.cancel()
    print(json.dumps(counts))


async def measure(effort: Effort, console: Console) -> Report:
    machine, turns = this_machine(), list[Turn]()
    period = effort.streams / effort.pace
    async with front(period, Shape(units=effort.units, models=effort.models)) as here:
        await turn(here, effort, effort.pages)  # what is made once is made
        for number in range(effort.turns):
            for pages in (0, effort.pages):
                console.print(f"page cost: turn {number + 1}, {pages} pages", style="dim")
                turns.append(await turn(here, effort, pages))
    without, with_pages = ([one for one in turns if bool(one.pages) is some] for some in (False, True))
    pairs = list(zip(without, with_pages, strict=True))
    core = median(after.core - before.core for before, after in pairs)
    memory = max(one.memory for one in with_pages) - min(one.memory for one in without)
    slower = median(after.per_token / before.per_token for before, after in pairs) - 1
    return Report(
        name="page-cost",
        title=f"{effort.pages} pages open on {effort.units} units, and {effort.streams} streams",
        columns=["pages", "gateway, cores", "ms a token", "MiB", "samples a page", "MiB to pages"],
        rows=[[one.pages, one.core, 1e3 * one.per_token, one.memory, one.samples, one.size] for one in turns],
        findings=[
            Finding(
                what="CPU that the pages add, median of turns", value=core, unit=" cores", most=MOST_CORE
            ),
            Finding(what="memory that the pages add, at most", value=memory, unit=" MiB", most=MOST_MIB),
            Finding(what="time per token, more by", value=100 * slower, unit=" %", most=100 * MOST_SLOWER),
        ],
        machine=machine,
    )


def main() -> None:
    parser = make_parser(__doc__)
    usual = Effort()
    parser.add_argument("--turns", type=int, default=usual.turns)
    parser.add_argument("--units", type=int, default=usual.units)
    parser.add_argument("--pages", type=int, default=usual.pages)
    parser.add_argument("--tokens", type=int, default=usual.tokens, help="of each stream")
    parser.add_argument("--watch", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watch:
        asyncio.run(watch(options.watch, options.pages))
        return
    console = Console()
    effort = Effort(turns=options.turns, units=options.units, pages=options.pages, tokens=options.tokens)
    publish(asyncio.run(measure(effort, console)), console)


if __name__ == "__main__":
    main()
