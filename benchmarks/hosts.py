"""What it costs that a fleet is on two hosts, against the same fleet on one.

python -m benchmarks.hosts. Two hosts are network namespaces of this machine, with Ray on both; so they share
its cores, and the link between them costs no time but the kernel's. The fleet has two units of the demo's
`sums`, on one host with K and V in shared memory, and one on each host of a cluster. Both fleets are there at
the same time, and are asked in turn: first tokens one request at a time, streams 32 at once. Ready: both
commands on a cluster of one host, in turn. Lost: three hosts, of which one loses its power under streams, and
the longest time for which a stream stands still. It needs root.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Final

import httpx
from rich.console import Console
from tests.hosts.fleets import RayCluster, served, units_of
from tests.hosts.fleets import serving as serving_over
from tests.hosts.hosts import Host, hosts

from benchmarks.load import Load
from benchmarks.report import Finding, Report, make_parser, publish, this_machine
from benchmarks.workload import Ask
from kvloom.config.config import DEMO

MOST_MS, LEAST_RATE, MOST_SECONDS = 3.0, 90.0, 3.0
MOST_UNKNOWN, MOST_QUIET = 5.0, 8.0  # seconds until a loss is known; and 3 more until all streams go on
CONFIG: Final = """\
port: {port}
kv_memory: 64MiB
block_bytes: 4KiB
program: {program}
rescheduling: none
models: {{sums: {demo}/sums}}
units: [{{models: [sums], replicas: {replicas}, threads: 1}}]
"""
ALONE, SPREAD = 8001, 8000  # the ports of both fleets
PROGRAMS: Final = ("data_parallel", "disaggregate")
VOCABULARY: Final = 256  # of its ids, those that stand for bytes
QUESTION: Final = {"role": "user", "content": "What is 17 + 25?"}
LOSS_STREAMS: Final = 9


@dataclass(frozen=True, slots=True)
class Effort:
    """rounds: requests for the first token's time; bursts: of streams, with so many tokens each."""

    rounds: int = 200
    bursts: int = 8
    streams: int = 32
    tokens: int = 200
    starts: int = 3
    losses: int = 3


@contextmanager
def serving(
    host: Host, folder: Path, port: int, program: str, *arguments: str
) -> Iterator[tuple[str, float]]:
    """Lets a fleet serve, and yields its address and the seconds until it was ready."""
    config = folder / f"{port}.yaml"
    config.write_text("host: 0.0.0.0\n" + CONFIG.format(port=port, program=program, demo=DEMO, replicas=2))
    began = time.perf_counter()
    with served(host, str(config), *arguments):
        yield f"http://{host.address}:{port}", time.perf_counter() - began


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
        RayCluster(made).start()
        for _ in range(starts):
            with serving(made[0], folder, ALONE, "data_parallel") as (_, seconds):
                alone.append(seconds)
            with serving(made[0], folder, SPREAD, "data_parallel", "--cluster", "auto") as (_, seconds):
                spread.append(seconds)
    return median(alone), median(spread)


@dataclass
class Quiet:
    """Streams that are asked for again and again, until they are to end."""

    url: str
    longest: float = 0.0
    """Seconds for which one of them had nothing to read."""
    read: int = 0
    """Lines of all."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False

    async def stream(self, client: httpx.AsyncClient, seed: int) -> None:
        ask = {"model": "sums", "messages": [QUESTION], "stream": True, "seed": seed}
        while not self.over:
            last = time.perf_counter()
            async with client.stream("POST", f"{self.url}/v1/chat/completions", json=ask) as answer:
                answer.raise_for_status()
                async for _ in answer.aiter_lines():
                    self.read += 1
                    if self.read == 20 * LOSS_STREAMS:
                        self.begun.set()
                    self.longest, last = max(self.longest, time.perf_counter() - last), time.perf_counter()

    async def play(self, lost: Callable[[], float]) -> float:
        """Returns what `lost` does once a host is lost, which is called while streams are under way."""
        async with httpx.AsyncClient(timeout=60.0) as client, asyncio.TaskGroup() as tasks:
            for seed in range(LOSS_STREAMS):
                tasks.create_task(self.stream(client, seed))
            await self.begun.wait()
            self.longest = 0.0
            known = await asyncio.to_thread(lost)
            await asyncio.sleep(2 * MOST_QUIET)
            self.over = True
        return known


def loss(folder: Path) -> tuple[float, float]:
    """Lets a host lose its power. Returns the seconds until the controller knows, and for which a stream had
    nothing to read."""
    with hosts(3) as made:
        cluster = RayCluster(made)
        cluster.start()
        config = CONFIG.format(port=SPREAD, program=PROGRAMS[0], demo=DEMO, replicas=3)
        with serving_over(cluster, config, folder) as fleet:
            victim = next(host for host in cluster.workers if units_of(host))

            def lost() -> float:
                began = time.perf_counter()
                victim.cut_power()
                while fleet.nodes().get(victim.address) == "there":
                    time.sleep(0.1)
                return time.perf_counter() - began

            quiet = Quiet(fleet.url)
            return asyncio.run(quiet.play(lost)), quiet.longest


def measure(effort: Effort, console: Console) -> Report:
    machine = this_machine()
    rows: list[list[str | int | float | None]] = []
    findings = []
    with tempfile.TemporaryDirectory() as told:
        folder = Path(told)
        console.print("hosts: ready", style="dim")
        alone, spread = ready_seconds(effort.starts, folder)
        console.print("hosts: lost", style="dim")
        known, quiet = map(max, zip(*(loss(folder) for _ in range(effort.losses)), strict=True))
        with hosts(2) as made:
            RayCluster(made).start()
            for program in PROGRAMS:
                console.print(f"hosts: {program}", style="dim")
                with (
                    serving(made[0], folder, ALONE, program) as (one, _),
                    serving(made[0], folder, SPREAD, program, "--cluster", "auto") as (two, _),
                ):
                    near, far = asyncio.run(ask([one, two], effort))
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
    findings += [
        Finding(what="ready later with a cluster", value=spread - alone, unit=" s", most=MOST_SECONDS),
        Finding(what="until a lost host is known", value=known, unit=" s", most=MOST_UNKNOWN),
        Finding(what="longest silence of a stream then", value=quiet, unit=" s", most=MOST_QUIET),
    ]
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
    parser.add_argument("--losses", type=int, default=usual.losses)
    options = parser.parse_args()
    console = Console()
    effort = Effort(options.rounds, options.bursts, starts=options.starts, losses=options.losses)
    publish(measure(effort, console), console)


if __name__ == "__main__":
    main()
