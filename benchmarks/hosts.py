"""What it costs that a fleet is on two hosts, against the same fleet on one.

python -m benchmarks.hosts. Two hosts are network namespaces of this machine, with Ray on both; so they share
its cores, and the link between them costs no time but the kernel's. The fleet has two units of the demo's
`sums`, on one host with K and V in shared memory, and one on each host of a cluster. Both fleets are there at
the same time, and are asked in turn: first tokens one request at a time, streams 32 at once. Ready: both
commands on a cluster of one host, in turn. It needs root.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Final

from rich.console import Console
from tests.hosts.hosts import Host, HostProcess, hosts

from benchmarks.load import Load
from benchmarks.report import Finding, Report, make_parser, publish, this_machine
from benchmarks.workload import Ask
from kvloom.config.config import DEMO

MOST_MS, LEAST_RATE, MOST_SECONDS = 3.0, 90.0, 3.0
CONFIG: Final = """\
host: 0.0.0.0
port: {port}
kv_memory: 64MiB
block_bytes: 4KiB
program: {program}
rescheduling: none
models: {{sums: {demo}/sums}}
units: [{{models: [sums], replicas: 2, threads: 1}}]
"""
ALONE, SPREAD = 8001, 8000  # the ports of both fleets
PROGRAMS: Final = ("data_parallel", "disaggregate")
VOCABULARY: Final = 256  # of its ids, those that stand for bytes
SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Effort:
    """rounds: requests for the first token's time; bursts: of streams, with so many tokens each."""

    rounds: int = 200
    bursts: int = 8
    streams: int = 32
    tokens: int = 200
    starts: int = 3


@dataclass
class Serving:
    """A `kvloom serve` that is ready, after so many seconds."""

    process: HostProcess
    url: str
    seconds: float = 0.0
    printed: list[str] = field(default_factory=list)


@contextmanager
def serving(host: Host, folder: Path, port: int, program: str, *arguments: str) -> Iterator[Serving]:
    config = folder / f"{port}.yaml"
    config.write_text(CONFIG.format(port=port, program=program, demo=DEMO))
    began = time.perf_counter()
    process = host.start(sys.executable, "-m", "kvloom.cli", "serve", str(config), *arguments)
    made = Serving(process, f"http://{host.address}:{port}")
    ready = threading.Event()

    def read() -> None:
        for line in process.stdout:
            made.printed.append(line.decode())
            if "Ready in" in made.printed[-1]:
                made.seconds = time.perf_counter() - began
                ready.set()
        ready.set()

    reading = threading.Thread(target=read)
    reading.start()
    try:
        if not ready.wait(SECONDS) or not made.seconds:
            raise RuntimeError(f"the fleet did not start: {''.join(made.printed)}")
        yield made
    finally:
        process.signal(signal.SIGINT)
        process.wait(SECONDS)
        reading.join()


def kvloom(host: Host, *arguments: str, token: str = "") -> str:
    return host.run(
        "env", f"RAY_AUTH_TOKEN={token}", sys.executable, "-m", "kvloom.cli", *arguments, seconds=SECONDS
    )


def clustered(made: Sequence[Host]) -> None:
    """Makes a cluster of the hosts."""
    head, *others = made
    told = kvloom(head, "cluster", "start", "--head", "--address", head.address, token="0" * 32)
    [token] = re.findall(r"RAY_AUTH_TOKEN=(\w+)", told)
    for host in others:
        kvloom(host, "cluster", "join", f"{head.address}:6379", token=token)


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one fleet: milliseconds to the first token, and tokens a second of each burst."""

    first: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


async def ask(urls: Sequence[str], effort: Effort) -> list[Seen]:
    """Asks the fleets in turn."""
    draw = Random(0)
    loads = [Load({"sums": url}, stream=True) for url in urls]
    seen = [Seen() for _ in urls]

    def one(output: int) -> Ask:
        return Ask("sums", [draw.randrange(4, VOCABULARY) for _ in range(128)], output)

    for i in range(effort.rounds + 20):
        for load, found in zip(loads, seen, strict=True):
            (outcome,), _ = await load.drive([one(4)])
            if outcome.error is not None or outcome.ttft is None:
                raise RuntimeError(outcome.error or "no token came")
            if i >= 20:
                found.first.append(1e3 * outcome.ttft)
    for _ in range(effort.bursts):
        for load, found in zip(loads, seen, strict=True):
            outcomes, seconds = await load.drive([one(effort.tokens) for _ in range(effort.streams)])
            if problems := [outcome.error for outcome in outcomes if outcome.error]:
                raise RuntimeError(problems[0])
            found.rates.append(effort.streams * effort.tokens / seconds)
    return seen


def ready_seconds(starts: int, folder: Path) -> tuple[float, float]:
    """Returns the median of the seconds to ready, without a cluster and on one of one host."""
    alone, spread = [], []
    with hosts(1) as made:
        clustered(made)
        for _ in range(starts):
            with serving(made[0], folder, ALONE, "data_parallel") as fleet:
                alone.append(fleet.seconds)
            with serving(made[0], folder, SPREAD, "data_parallel", "--cluster", "auto") as fleet:
                spread.append(fleet.seconds)
    return median(alone), median(spread)


def measure(effort: Effort, console: Console) -> Report:
    machine = this_machine()
    rows: list[list[str | int | float | None]] = []
    findings = []
    with tempfile.TemporaryDirectory() as told:
        folder = Path(told)
        console.print("hosts: ready", style="dim")
        alone, spread = ready_seconds(effort.starts, folder)
        with hosts(2) as made:
            clustered(made)
            for program in PROGRAMS:
                console.print(f"hosts: {program}", style="dim")
                with (
                    serving(made[0], folder, ALONE, program) as one,
                    serving(made[0], folder, SPREAD, program, "--cluster", "auto") as two,
                ):
                    near, far = asyncio.run(ask([one.url, two.url], effort))
                added = median(far.first) - median(near.first)
                kept = 100 * median(far.rates) / median(near.rates)
                rows.append(
                    [program, median(near.first), median(far.first), median(near.rates), median(far.rates)]
                )
                findings += [
                    Finding(
                        what=f"two hosts add to the first token, {program}",
                        value=added,
                        unit=" ms",
                        most=MOST_MS,
                    ),
                    Finding(
                        what=f"tokens/s on two hosts, {program}", value=kept, unit=" %", least=LEAST_RATE
                    ),
                ]
    findings.append(
        Finding(what="ready later with a cluster", value=spread - alone, unit=" s", most=MOST_SECONDS)
    )
    return Report(
        name="hosts",
        title="a fleet of two units on one host, and on two (ms to the first token; tokens/s)",
        columns=["program", "first, one host", "first, two hosts", "tokens/s, one", "tokens/s, two"],
        rows=rows,
        findings=findings,
        machine=machine,
        notes=[f"ready after {alone:.2f} s without a cluster, {spread:.2f} s with one"],
    )


def main() -> None:
    parser = make_parser(__doc__)
    usual = Effort()
    parser.add_argument("--rounds", type=int, default=usual.rounds)
    parser.add_argument("--bursts", type=int, default=usual.bursts)
    parser.add_argument("--starts", type=int, default=usual.starts)
    options = parser.parse_args()
    console = Console()
    effort = Effort(options.rounds, options.bursts, starts=options.starts)
    publish(measure(effort, console), console)


if __name__ == "__main__":
    main()
