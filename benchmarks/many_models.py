"""Twenty models in the memory of four: one budget, whole processes that are swapped, units that come and go.

python -m benchmarks.many_models [--models 20] [--rate 1] [--seconds 60] [--systems budget swap units]
[--policy slack]

Models have the shapes A and B in turn, in bfloat16; popularity by power law, α = 0.9; Poisson arrivals from
one seed, the same for each system. budget: one kvloom with `memory`, which holds two models of each shape and
a pool. swap: a server as llama-swap is, of one kvloom process at a time: a request for another model waits
until all before it have been answered and that model's process has started. units: a unit a model with
`least: 0`, in the same memory: kvloom bounds nothing over units that come and go, so this driver keeps
weights and pools of those that are up within it. It stops the one that was asked longest ago (/admin/scale),
an idle one if there is one, and asks for a model once there is room. What the processes have beside, about
300 MB each, is not counted. A request is in time if its first token comes within 2 s of when it was due, and
each further one within 200 ms on average, which is what models have as `slo`.

With a budget it tells of the wait for a cold model, too: the first token of requests that found their model
asleep, less that of a like one that did not, over its own load time, from the start of a process of that
model alone, and over the seconds that it took to be woken the last time.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Final, Protocol

import aiohttp
import yaml
from rich.console import Console

from benchmarks.load import Load, Outcome
from benchmarks.places import BENCH, LOGS, checkpoint
from benchmarks.process import Command, free_port, running
from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from benchmarks.workload import Ask, burst, poisson, power_law
from kvloom.types.spec import Policy

ALPHA: Final = 0.9
OUTPUTS: Final = (16, 32, 64)
TTFT, TPOT = 2.0, 0.2  # seconds
BUDGET: Final = 704 << 20  # bytes: twice A's 173 MiB and B's 41, the reserve, and a pool of about 240
POOL: Final = 256 << 20
PATIENCE: Final = 600.0
LOOK: Final = 0.05  # seconds between two looks at which units are away
WEIGHTS: Final = {"A": 173 << 20, "B": 41 << 20}  # bytes
UNIT_POOL: Final = 60 << 20  # so that two units of each shape fill the budget
SYSTEMS: Final = ("budget", "swap", "units")
POLICIES: Final[tuple[Policy, ...]] = ("slack", "adbs")
LEAST: Final = {"swap": 3.0, "units": 1.5}
MOST_WAIT: Final = 2.0  # times a model's own load time


@dataclass(frozen=True, slots=True)
class Effort:
    models: int = 20
    rate: float = 1.0
    seconds: float = 60.0
    seed: int = 0
    policy: Policy = "slack"

    @property
    def shapes(self) -> dict[str, str]:
        """The shape of each model, the most popular one first."""
        return {f"m{i:02}": "AB"[i % 2] for i in range(self.models)}

    def asks(self) -> list[Ask]:
        rates = power_law(list(self.shapes), ALPHA, self.rate)
        return poisson(rates, self.seconds, OUTPUTS, self.seed)


QUICK: Final = Effort(models=3, seconds=4.0)


@dataclass(slots=True)
class Cold:
    """The wait for models that were asleep. asks: by whether their model was, with the seconds until their
    first token. loads: seconds of a process's start, by shape; wakes: of the last waking, by model."""

    asks: list[tuple[Ask, bool, float]] = field(default_factory=list)
    loads: dict[str, float] = field(default_factory=dict)
    wakes: dict[str, float] = field(default_factory=dict)

    def waits(self, shapes: Mapping[str, str]) -> list[tuple[str, float]]:
        """Returns each cold request's model, and by how much longer it waited than a like one whose model
        was awake."""
        warm: dict[tuple[str, int], list[float]] = {}
        for ask, cold, ttft in self.asks:
            if not cold:
                warm.setdefault((shapes[ask.model], len(ask.prompt)), []).append(ttft)
        likes = {kind: median(found) for kind, found in warm.items()}
        return [
            (ask.model, ttft - likes.get((shapes[ask.model], len(ask.prompt)), 0.0))
            for ask, cold, ttft in self.asks
            if cold
        ]


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


class Budget(Fleet):
    """One server of models that sleep, which is asked before each request who does."""

    def __init__(self, url: str, models: Sequence[str], cold: Cold) -> None:
        super().__init__(url, models)
        self._url = url
        self.cold = cold

    async def ask(self, ask: Ask) -> Outcome:
        loop = asyncio.get_running_loop()
        due = loop.time()
        awake = await self.told("kvloom_weights_awake")
        asked = loop.time()
        outcome = later(await super().ask(ask), asked - due)
        if outcome.ttft is not None:
            self.cold.asks.append((ask, awake[ask.model] == 0, outcome.ttft))
            self.cold.wakes = await self.told("kvloom_weights_wake_seconds")
        return outcome

    async def told(self, metric: str) -> dict[str, float]:
        """Returns a metric of each model."""
        async with aiohttp.ClientSession() as session, session.get(f"{self._url}/metrics") as response:
            text = await response.text()
        found = re.findall(rf'^{metric}\{{.*?model="(\w+)".*?\}} (\S+)$', text, re.M)
        return {model: float(value) for model, value in found}


class Bounded(Fleet):
    """One server of a unit a model, of which only so many have a process that they fit the budget."""

    def __init__(self, url: str, sizes: Mapping[str, int]) -> None:
        """sizes: bytes of weights and pool, by model; units have the same order."""
        super().__init__(url, list(sizes))
        self._url = url
        self._sizes = sizes
        self._units = {model: f"unit-{i}" for i, model in enumerate(sizes)}
        self._up: dict[str, float] = {}
        """When each model that has a process was last asked."""
        self._asks: dict[str, set[asyncio.Task[Outcome]]] = {model: set() for model in sizes}
        self._turn = asyncio.Lock()

    async def ask(self, ask: Ask) -> Outcome:
        loop = asyncio.get_running_loop()
        due = loop.time()
        if ask.model not in self._up:
            async with self._turn:
                while sum(map(self._sizes.__getitem__, {*self._up, ask.model})) > BUDGET:
                    oldest = min(self._up, key=lambda model: (bool(self._asks[model]), self._up[model]))
                    del self._up[oldest]  # who asks for it from now on waits for its turn
                    await asyncio.gather(*self._asks[oldest])
                    await self.stop([oldest])
                self._up[ask.model] = loop.time()
        self._up[ask.model], waited = loop.time(), loop.time() - due
        task = asyncio.create_task(super().ask(ask))
        self._asks[ask.model].add(task)
        task.add_done_callback(self._asks[ask.model].discard)
        return later(await task, waited)

    async def stop(self, models: Sequence[str]) -> None:
        """Ends these models' processes, once nothing runs there."""
        units = {self._units[model] for model in models}
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{self._url}/admin/scale", json={"stop": sorted(units)}) as response:
                response.raise_for_status()
            while True:
                async with session.get(f"{self._url}/admin/units") as response:
                    states = {unit["name"]: unit["state"] for unit in await response.json()}
                if all(states[unit] == "away" for unit in units):
                    break
                await asyncio.sleep(LOOK)


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
        return later(await task, waited)

    async def _swap(self, model: str) -> None:
        await self.close()
        command, url = serve({model: {"path": str(self.paths[model])}}, {"kv_memory": POOL}, "swap")
        server = await self._served.enter_async_context(running(command, patience=PATIENCE))
        self._model, self._url = model, url
        self.loads.append(server.start_seconds)

    async def close(self) -> None:
        await self._served.aclose()
        self._model = ""


def later(outcome: Outcome, waited: float) -> Outcome:
    """Returns the outcome of a request that waited before it was sent."""
    ttft = None if outcome.ttft is None else outcome.ttft + waited
    return replace(outcome, latency=outcome.latency + waited, ttft=ttft)


def serve(
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
    if name == "units":
        replicas = {"least": 0, "most": 1}
        units = [{"models": [model], "replicas": replicas, "kv_memory": UNIT_POOL} for model in models]
        command, url = serve(models, {"units": units, "patience": "600s"}, name)
        async with running(command, patience=PATIENCE):
            bounded = Bounded(url, {m: WEIGHTS[shape] + UNIT_POOL for m, shape in effort.shapes.items()})
            await bounded.stop(list(models))
            yield bounded
        return
    cold = Cold()
    for shape, path in {shape: paths[model] for model, shape in effort.shapes.items()}.items():
        command, _ = serve({shape: {"path": str(path)}}, {"kv_memory": POOL}, "load")
        async with running(command, patience=PATIENCE) as server:
            cold.loads[shape] = server.start_seconds
    command, url = serve(models, {"memory": BUDGET, "policy": effort.policy}, name)
    async with running(command, patience=PATIENCE):
        yield Budget(url, list(models), cold)


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
    cold: list[Finding] = []
    for name in systems:
        async with system(name, effort) as served:
            if name == "budget":  # the others' processes are new for each model, which is what is measured
                await drive(served, burst("m00", 4, 8, seed=99))
            console.print(f"{name}: {len(asks)} requests", style="dim")
            found[name] = await drive(served, asks)
            if isinstance(served, Budget):
                cold = _waits(served.cold, effort.shapes)
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
        findings += cold
    return Report(
        name="many-models",
        title=f"{effort.models} models in the memory of four, {effort.rate:g} req/s, α = {ALPHA}",
        columns=["", "requests", "in time", "%", "first token, p50 s", "p99 s", "failed"],
        rows=[_row(name, outcomes, counts[name]) for name, outcomes in found.items()],
        findings=findings,
        machine=machine,
        notes=[f"In time: first token within {TTFT:g} s, then {1000 * TPOT:g} ms a token."],
    )


def _waits(cold: Cold, shapes: Mapping[str, str]) -> list[Finding]:
    """What those waited whose model was asleep."""
    waits = cold.waits(shapes)
    if not waits:
        return []
    loads = sorted(wait / cold.loads[shapes[model]] for model, wait in waits)
    wakes = sorted(wait / cold.wakes[model] for model, wait in waits if cold.wakes.get(model))
    told = ", ".join(f"{shape} {seconds:.2f} s" for shape, seconds in cold.loads.items())
    waking = ", ".join(
        f"{shape} {1e3 * median(found):.0f} ms"
        for shape in sorted(set(shapes.values()))
        if (found := [s for model, s in cold.wakes.items() if shapes[model] == shape and s])
    )
    what = f"the wait for a cold model ({len(waits)} of {len(cold.asks)} requests)"
    return [
        Finding(what=f"{what}, p99", value=_p99(sorted(wait for _, wait in waits)), unit=" s"),
        Finding(what=f"{what}, p99, by its load ({told})", value=_p99(loads), unit="×", most=MOST_WAIT),
        Finding(what=f"{what}, p99, by its last waking ({waking})", value=_p99(wakes), unit="×"),
    ]


def _p99(found: Sequence[float]) -> float:
    return quantiles(found, n=100)[98] if len(found) > 1 else sum(found)


def _row(name: str, outcomes: Sequence[Outcome], count: int) -> list[Cell]:
    first = [outcome.ttft for outcome in outcomes if outcome.ttft is not None]
    p99 = _p99(first) if len(first) > 1 else None
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
    parser.add_argument("--policy", choices=POLICIES, default=whole.policy, help="with a budget")
    given = parser.parse_args()
    console = Console()
    effort = Effort(models=given.models, rate=given.rate, seconds=given.seconds, policy=given.policy)
    publish(asyncio.run(measure(given.systems, effort, console)), console)


if __name__ == "__main__":
    main()
