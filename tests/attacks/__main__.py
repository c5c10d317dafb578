"""`python -m tests.attacks [NAME ...]` plays the attacks beside an innocent client, and prints a table."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from tests.attacks.attacks import ATTACKS, bad_requests, bad_requests_and_a_kill, stopped_gateway
from tests.attacks.fleet import Fleet, forget_peak, innocent, resident, serving

LONE_SECONDS: Final = 8.0
AFTER_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Result:
    """What an attack did to others. Times in seconds, memory in MiB."""

    attack: str
    said: str
    lone_p99: float
    p99: float
    gap: float
    wrong: int
    first_wrong: str
    gateway_mib: float
    lost: list[str]
    """Processes of the fleet that are not there any more."""


async def under(name: str, fleet: Fleet) -> Result:
    """Plays an attack beside an innocent client of another model."""
    async with innocent(fleet, "guide") as lone:
        await asyncio.sleep(LONE_SECONDS)
    before, gateway = fleet.processes(), fleet.gateway()
    forget_peak(gateway)
    async with innocent(fleet, "guide") as client:
        said = await ATTACKS[name](fleet)
        await asyncio.sleep(AFTER_SECONDS)
    after = fleet.processes()
    lost = [one for one, pid in before.items() if after.get(one) != pid]
    wrong = client.wrong
    memory = resident(gateway) if gateway in after.values() else float("nan")
    first = wrong[0] if wrong else ""
    return Result(name, said, lone.p99(), client.p99(), client.gap, len(wrong), first, memory, lost)


@asynccontextmanager
async def closed_pipe() -> AsyncIterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


async def alone() -> dict[str, str]:
    """Plays the attacks that have a fleet of their own."""
    found = {}
    full = os.open("/dev/full", os.O_WRONLY)
    async with serving(output=full) as fleet:
        found["4 full disk as log"] = await bad_requests(fleet)
    reader, writer = os.pipe()
    async with serving(output=writer) as fleet:
        found["5 unread pipe as log"] = await bad_requests_and_a_kill(fleet)
    os.close(reader)
    async with serving(output=writer) as fleet:
        found["4 log without a reader"] = await bad_requests(fleet)
    os.close(writer)
    async with serving() as fleet:
        found["8 stopped gateway"] = await stopped_gateway(fleet)
    return found


async def main(names: list[str]) -> None:
    console, table = (
        Console(),
        Table("attack", "lone p99", "p99", "gap", "wrong", "gateway MiB", "lost", "said"),
    )
    results: list[Result] = []
    for name in [one for one in ATTACKS if not names or any(one.startswith(part) for part in names)]:
        async with serving() as fleet:
            result = await under(name, fleet)
        results.append(result)
        console.print_json(json.dumps(asdict(result)))
        times = (f"{one:.2f}" for one in (result.lone_p99, result.p99, result.gap))
        table.add_row(
            name, *times, str(result.wrong), f"{result.gateway_mib:.0f}", str(result.lost), result.said
        )
    if not names:
        for name, said in (await alone()).items():
            table.add_row(name, *[""] * 6, said)
    console.print(table)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
