"""Twenty models in the memory of four: one budget, whole processes that are swapped, units that come and go.

python -m benchmarks.many_models [--models 20] [--rate 1] [--seconds 60] [--systems budget swap units]

Models have the shapes A and B in turn, in bfloat16; popularity by power law, α = 0.9; Poisson arrivals from
one seed, the same for each system. budget: one kvloom with `memory`, which holds two models of each shape and
a pool. swap: a server as llama-swap is, of one kvloom process at a time: a request for another model waits
until all before it have been answered and that model's process has started. units: a unit a model with
`least: 0`, which has as much memory as it likes. A request is in time if its first token comes within 2 s of
when it was due, and each further one within 200 ms on average.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Final, Protocol

import yaml
from rich.console import Console

from benchmarks.load import Load, Outcome
from benchmarks.places import BENCH, LOGS, checkpoint
from benchmarks.process import Command, free_port, running
from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from benchmarks.workload import Ask, burst, poisson, power_law

ALPHA: Final = 0.9
OUTPUTS: Final = (16, 32, 64)
TTFT, TPOT = 2.0, 0.2  # seconds
BUDGET: Final = 704 << 20  # bytes: twice A's 173 MiB and B's 41, the reserve, and a pool of about 240
POOL: Final = 256 << 20
PATIENCE: Final = 600.0
SYSTEMS: Final = ("budget", "swap", "units")
LEAST: Final = {"swap": 3.0, "units": 1.5}


@dataclass(frozen=True, slots=True)
class Effort:
    models: int = 20
    rate: float = 1.0
    seconds: float = 60.0
    seed: int = 0

    @property
    def shapes(self) -> dict[str, str]:
        """The shape of each model, the most popular one first."""
        return {f"m{i:02}": "AB"[i % 2] for i in range(self.models)}

    def asks(self) -> list[Ask]:
        rates = power_law(list(self.shapes), ALPHA, self.rate)
        return poisson(rates, self.seconds, OUTPUTS, self.seed)


QUICK: Final = Effort(models=3, seconds=4.0)


class System(Protocol):
    async def ask(self, ask: Ask) -> Outcome:
        """Asks as soon as it is called, and counts from then."""


class Fleet:
    """One server of all models."""

    def __init__(self, url: str, models: Sequence[str]) -> None:
        self._load = Load(dict.fromkeys(models, url), stream=True)

    async def ask(self, ask: Ask) -> Outcome:
        (outcome,), _ = await self._load.drive([replace(ask, at=0.0)])
        return outcome


@dataclass
class Swapper:
    """Has one process at a time. Requests take turns in the order of their coming; those that follow each
    other and are for one model run together."""

    paths: Mapping[str, Path]
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _model: str = ""
    _url: str = ""
    _asks: set[asyncio.Task[Outcome]] = field(default_factory=set)
    _served: AsyncExitStack = field(default_factory=AsyncExitStack)
    loads: list[float] = field(default_factory=list)

    async def ask(self, ask: Ask) -> Outcome:
        loop = asyncio.get_running_loop()
        due = loop.time()
        async with self._turn:
            if ask.model != self._model:
                await asyncio.gather(*self._asks)
                await self._swap(ask.model)
            waited = loop.time() - due
            task = asyncio.create_task(Fleet(self._url, [ask.model]).ask(ask))
            self._asks.add(task)
            task.add_done_callback(self._asks.discard)
        outcome = await task
        ttft = None if outcome.ttft is None else outcome.ttft + waited
        return replace(outcome, latency=outcome.latency + waited, ttft=ttft)

    async def _swap(self, model: str) -> None:
        await self.close()
        command, url = _serve({model: {"path": str(self.paths[model])}}, {"kv_memory": POOL}, "swap")
        server = await self._served.enter_async_context(running(command, patience=PATIENCE))
        self._model, self._url = model, url
        self.loads.append(server.start_seconds)

    async def close(self) -> None:
        await self._served.aclose()
        self._model = ""


def _serve(
    models: Mapping[str, Mapping[str, object]], keys: Mapping[str, object], name: str
) -> tuple[Command, str]:
    port = free_port()
    file = BENCH / f"many-models-{name}.yaml"
    file.write_text(yaml.safe_dump({"port": port, "models": dict(models), **keys}))
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "kvloom.cli", "serve", str(file)]
    return Command(f"kvloom {name}", argv, {}, f"{url}/health", LOGS / f"many-models-{name}.log"), url


@asynccontextmanager
async def system(name: str, effort: Effort) -> AsyncIterator[System]:
    """The system, once it serves."""
    paths = {model: checkpoint(shape, "bfloat16") for model, shape in effort.shapes.items()}
    models = {model: {"path": str(path)} for model, path in paths.items()}
    if name == "swap":
        swapper = Swapper(paths)
        try:
            yield swapper
        finally:
            await swapper.close()
        return
    keys: dict[str, object] = {"memory": BUDGET}
    if name == "units":
        replicas = {"least": 0, "most": 1}
        units = [{"models": [model], "replicas": replicas, "kv_memory": POOL // 4} for model in models]
        keys = {"units": units}
    command, url = _serve(models, keys, name)
    async with running(command, patience=PATIENCE):
        yield Fleet(url, list(models))


async def drive(served: System, asks: Sequence[Ask]) -> list[Outcome]:
    """Asks each when it is due; returns their outcomes in the same order."""
    loop = asyncio.get_running_loop()
    started = loop.time()

    async def one(ask: Ask) -> Outcome:
        await asyncio.sleep(max(0.0, started + ask.at - loop.time()))
        return await served.ask(ask)

    return await asyncio.gather(*map(one, asks))


def in_time(outcome: Outcome) -> bool:
    if outcome.error is not None or outcome.ttft is None:
        return False
    tpot = (outcome.latency - outcome.ttft) / max(1, outcome.tokens - 1)
    return outcome.ttft <= TTFT and tpot <= TPOT


async def measure(systems: Sequence[str], effort: Effort, console: Console) -> Report:
    machine = this_machine()
    asks, found = effort.asks(), dict[str, list[Outcome]]()
    for name in systems:
        async with system(name, effort) as served:
            if name == "budget":  # the others' processes are new for each model, which is what is measured
                await drive(served, burst("m00", 4, 8, seed=99))
            console.print(f"{name}: {len(asks)} requests", style="dim")
            found[name] = await drive(served, asks)
    counts = {name: sum(map(in_time, outcomes)) for name, outcomes in found.items()}
    findings = [
        Finding(
            what=f"in time: budget / {name}", value=counts["budget"] / max(1, count), unit="×", least=least
        )
        for name, count in counts.items()
        if "budget" in counts and (least := LEAST.get(name)) is not None
    ]
    if "budget" in found:
        refused = sum(outcome.error is not None for outcome in found["budget"])
        findings.append(Finding(what="refused or failed with a budget", value=refused, unit="", most=0))
    return Report(
        name="many-models",
        title=f"{effort.models} models in the memory of four, {effort.rate:g} req/s, α = {ALPHA}",
        columns=["", "requests", "in time", "%", "first token, p50 s", "p99 s", "failed"],
        rows=[_row(name, outcomes, counts[name]) for name, outcomes in found.items()],
        findings=findings,
        machine=machine,
        notes=[f"In time: first token within {TTFT:g} s, then {1000 * TPOT:g} ms a token."],
    )


def _row(name: str, outcomes: Sequence[Outcome], count: int) -> list[Cell]:
    first = [outcome.ttft for outcome in outcomes if outcome.ttft is not None]
    p99 = quantiles(first, n=100)[98] if len(first) > 1 else None
    failed = sum(outcome.error is not None for outcome in outcomes)
    share = 100 * count / max(1, len(outcomes))
    return [name, len(outcomes), count, share, median(first) if first else None, p99, failed]


def main() -> None:
    parser = make_parser(__doc__)
    whole = Effort()
    parser.add_argument("--models", type=int, default=whole.models)
    parser.add_argument("--rate", type=float, default=whole.rate)
    parser.add_argument("--seconds", type=float, default=whole.seconds)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    given = parser.parse_args()
    console = Console()
    effort = Effort(models=given.models, rate=given.rate, seconds=given.seconds)
    publish(asyncio.run(measure(given.systems, effort, console)), console)


if __name__ == "__main__":
    main()
