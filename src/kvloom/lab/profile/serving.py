"""The real server under calibrating loads: what its processes do besides jobs."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvloom.lab.profile.processes import all_threads_seconds, descendants, main_thread_seconds
from kvloom.lab.profile.served import Answered
from kvloom.lab.profile.session import Effort
from kvloom.lab.workload.request import WorkloadRequest
from kvloom.lab.workload.results import Results, read_results
from kvloom.lab.workload.traces import VERSION, Header, write_workload
from kvloom.plan.cost.fit import fit_positive
from kvloom.plan.cost.measured import Measured
from kvloom.plan.cost.profile import HostedSeconds, Role
from kvloom.plan.cost.work import Work
from kvloom.serve.local import ENGINE_MODULE, GATEWAY_MODULE
from kvloom.types.errors import ConfigError

LEAST: Final = 1e-9  # seconds; a fit by ratios wants more than 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """The measurements under one load."""

    requests: int
    tokens: int
    """The tokens of all answers."""
    turns: float
    """About how many times tokens came, however many at a time."""
    cpu: dict[Role, float]
    """The CPU seconds of each role; those of the client are from its start to its end."""


def split_cpu_time(loads: Sequence[Loaded]) -> tuple[HostedSeconds, ...]:
    """Splits each role's CPU seconds into a cost per request, per token and per turn, by least squares. For
    the client a constant takes up its start, and is dropped."""
    return tuple(_role_costs(role, loads) for role in ("client", "gateway", "engine"))


def _role_costs(role: Role, loads: Sequence[Loaded]) -> HostedSeconds:
    features = np.array([[load.requests, load.tokens, load.turns] for load in loads], float)
    if role == "client":
        features = np.column_stack([features, np.ones(len(loads))])
    seconds = np.array([max(load.cpu[role], LEAST) for load in loads])
    request, token, turn, *_ = fit_positive(features, seconds).tolist()
    return HostedSeconds(role=role, request=request, token=token, turn=turn)


KEY_VARIABLE: Final = "KVLOOM_API_KEY"  # that `kvloom bench serve` reads
READY: Final = re.compile(r"Ready in .*?(http://\S+)")
START_TIMEOUT: Final = 600.0  # seconds for the server to start
PROMPT: Final = 48  # tokens
SHORTEST, LONGEST = 16, 96  # answers, in tokens


@dataclass(frozen=True, slots=True)
class Load:
    """Requests sent all at once: `at_once` for each model, each with an answer of `output` tokens."""

    at_once: int
    output: int

    def requests(self, models: Sequence[str]) -> list[WorkloadRequest]:
        return [
            WorkloadRequest(at=0.0, model=model, prompt=PROMPT, output=self.output)
            for _ in range(self.at_once)
            for model in models
        ]


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. `gateway` and `engines` are the ids of its processes."""

    url: str
    gateway: int
    engines: tuple[int, ...]

    def cpu(self) -> dict[Role, float]:
        """Returns the CPU seconds of each role up to now. Those of clients count when they have ended."""
        loops = sum(main_thread_seconds(pid) for pid in self.engines)
        return {"gateway": all_threads_seconds(self.gateway), "engine": loops, "client": _children_seconds()}


def serving_loads(cost: Measured, models: Sequence[str], effort: Effort, most: int) -> list[Load]:
    """Returns loads by which the three costs can be told apart: few and many requests with answers that last
    about `effort.load_seconds`; many with two tokens each; and one request of one token to each model,
    which is nearly all client start. `most` is a cap on requests at once."""
    loads = []
    for count in dict.fromkeys(min(count, most) for count in effort.at_once):
        steps = [
            cost.seconds(Work.decode(model, 1.0, [PROMPT] * count)) + cost.between(count) for model in models
        ]
        loads.append(Load(count, max(SHORTEST, min(LONGEST, round(effort.load_seconds / sum(steps))))))
    return [*loads, Load(loads[-1].at_once, 2), Load(1, 1)]


async def measure_serving(
    arguments: Sequence[str],
    key: str | None,
    models: Sequence[str],
    between: Callable[[int], float],
    loads: Sequence[Load],
    at_random: Sequence[WorkloadRequest],
    tell: Callable[[str], None],
) -> tuple[tuple[HostedSeconds, ...], Answered]:
    """Returns what the server's threads and the client do besides jobs, by `loads`, and how long the requests
    `at_random` took.

    `arguments` are those with which `kvloom serve` serves these models. `between` returns the seconds of an
    engine's own work after a step of so many sequences, which are left out. Each load is sent by `kvloom
    bench serve` in a process of its own. The first load is sent once more before all others, so that what is
    done only once is not measured. Raises ConfigError if the server does not start, or leaves a
    request without an answer."""
    found = list[Loaded]()
    with tempfile.TemporaryDirectory(prefix="kvloom-") as folder:
        async with _served(arguments) as server:
            client = _Client(server.url, key, Path(folder))
            for load in (loads[0], *loads):
                tell(f"{load.at_once} requests at once of each model, {load.output} tokens each")
                before = server.cpu()
                total = (await client.ask(load.requests(models))).total
                cpu = {role: after - before[role] for role, after in server.cpu().items()}
                turns = len(models) * load.output
                cpu["engine"] -= turns * between(load.at_once)
                found.append(Loaded(total.requests, total.output_tokens, turns, cpu))
            tell(f"{len(at_random)} requests at random moments")
            answered = Answered.of(at_random, await client.ask(at_random))
    return split_cpu_time(found[1:]), answered


@asynccontextmanager
async def _served(arguments: Sequence[str]) -> AsyncIterator[Server]:
    """Starts `kvloom serve`, yields the server, and ends it after the block."""
    process = await _kvloom({}, "serve", *arguments, "--host", "127.0.0.1", "--port", "0")
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT):
            url = await _ready(process.stdout)
        started = descendants(process.pid)
        gateway = next(pid for pid, command in started.items() if GATEWAY_MODULE in command)
        engines = tuple(pid for pid, command in started.items() if ENGINE_MODULE in command)
        reading = asyncio.create_task(process.stdout.read())  # a full pipe would hold it up
        try:
            yield Server(url, gateway, engines)
        finally:
            reading.cancel()
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _ready(output: asyncio.StreamReader) -> str:
    """Returns the URL once the server answers. Raises ConfigError if it ends first."""
    last = ""
    async for line in output:
        last = line.decode(errors="replace").strip() or last
        if found := READY.search(last):
            return found[1]
    raise ConfigError(f"`kvloom serve` with this config did not start: {last}; one that it serves is right")


@dataclass
class _Client:
    """Sends workloads to the server at `url`, with the key if there is one. `number` is that of the next
    workload, by which each has prompts of its own."""

    url: str
    key: str | None
    folder: Path
    number: int = 0

    async def ask(self, requests: Sequence[WorkloadRequest]) -> Results:
        """Sends each request at its time, and returns what came of them."""
        place, models = self.folder / str(self.number), dict.fromkeys(request.model for request in requests)
        workload, results = place.with_suffix(".jsonl"), place.with_suffix(".json")
        header = Header(kvloom_workload=VERSION, seed=self.number, models=tuple(models))
        self.number += 1
        write_workload(workload, header, requests)
        process = await _kvloom(
            {KEY_VARIABLE: self.key} if self.key else {},
            *("bench", "serve", "--url", self.url, "--workload", str(workload), "--json", str(results)),
        )
        try:
            told, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        found = read_results(results) if results.exists() else None
        if found is None or found.total.errors:
            last = (told.decode(errors="replace").strip().splitlines() or ["no word"])[-1]
            raise ConfigError(f"the served models did not answer all: {last}; a config that works is right")
        return found


async def _kvloom(environment: Mapping[str, str], *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvloom.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **environment},
    )


def _children_seconds() -> float:
    """Returns the CPU seconds of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
