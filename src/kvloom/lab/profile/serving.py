"""The real server under calibrating loads: what its processes do besides jobs."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final

import aiohttp
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

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
    """How many times tokens came, however many at a time: the jobs."""
    cpu: Mapping[Role, float]
    """The CPU seconds of each role; the engines' are without their own work between steps."""


def split_cpu_time(loads: Sequence[Loaded]) -> tuple[HostedSeconds, ...]:
    """Splits each role's CPU seconds into a cost per request, per token and per turn, by least squares."""
    return tuple(_role_costs(role, loads) for role in ("client", "gateway", "engine"))


def _role_costs(role: Role, loads: Sequence[Loaded]) -> HostedSeconds:
    features = np.array([[load.requests, load.tokens, load.turns] for load in loads], float)
    seconds = np.array([max(load.cpu[role], LEAST) for load in loads])
    request, token, turn = fit_positive(features, seconds).tolist()
    return HostedSeconds(role=role, request=request, token=token, turn=turn)


KEY_VARIABLE: Final = "KVLOOM_API_KEY"  # that `kvloom bench serve` reads
JOBS: Final = {"kvloom_prefill_jobs": 1, "kvloom_decode_jobs": 1, "kvloom_mixed_jobs": -1}
"""Metrics that together count jobs: a mixed one counts as a prefill and as a decode step, too."""
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
        """Returns the CPU seconds of the server's roles up to now."""
        loops = sum(main_thread_seconds(pid) for pid in self.engines)
        return {"gateway": all_threads_seconds(self.gateway), "engine": loops}


def serving_loads(cost: Measured, models: Sequence[str], effort: Effort, most: int) -> list[Load]:
    """Returns loads by which the three costs can be told apart: few and many requests with answers that last
    about `effort.load_seconds`, and many with two tokens each. `most` is a cap on requests at once."""
    loads = []
    for count in dict.fromkeys(min(count, most) for count in effort.at_once):
        steps = [
            cost.seconds(Work.decode(model, 1.0, [PROMPT] * count)) + cost.between(count) for model in models
        ]
        loads.append(Load(count, max(SHORTEST, min(LONGEST, round(effort.load_seconds / sum(steps))))))
    return [*loads, Load(loads[-1].at_once, 2)]


async def measure_serving(
    arguments: Sequence[str],
    key: str | None,
    models: Sequence[str],
    between: Callable[[int], float],
    loads: Sequence[Load],
    at_random: Sequence[WorkloadRequest],
    tell: Callable[[str], None],
) -> tuple[tuple[HostedSeconds, ...], Answered]:
    """Returns what the server's threads and the client do besides jobs, by `loads` and by the requests
    `at_random`, and how long these took.

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
                found.append((await _loaded(server, client, load.requests(models), between))[0])
            tell(f"{len(at_random)} requests at random moments")
            loaded, results = await _loaded(server, client, at_random, between)
    return split_cpu_time([*found[1:], loaded]), Answered.of(at_random, results)


async def _loaded(
    server: Server, client: _Client, requests: Sequence[WorkloadRequest], between: Callable[[int], float]
) -> tuple[Loaded, Results]:
    """Returns what a load was measured to take, and what came of its requests."""
    jobs, before = await client.jobs(), server.cpu()
    results = await client.ask(requests)
    cpu = {role: after - before[role] for role, after in server.cpu().items()}
    turns, total = await client.jobs() - jobs, results.total
    if turns <= 0 or results.client_cpu is None:
        raise ConfigError(f"the served models counted {turns:.0f} jobs for {total.requests} requests")
    cpu["engine"] -= turns * between(round(total.output_tokens / turns))
    cpu["client"] = results.client_cpu
    return Loaded(total.requests, total.output_tokens, turns, cpu), results


def count_jobs(metrics: str) -> float:
    """Returns how many jobs all engines have run, by what `/metrics` says."""
    return sum(
        JOBS[family.name] * sample.value
        for family in text_string_to_metric_families(metrics)
        if family.name in JOBS
        for sample in family.samples
        if sample.name == f"{family.name}_total"
    )


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

    async def jobs(self) -> float:
        """Returns how many jobs the server's engines have run up to now."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        async with (
            aiohttp.ClientSession(self.url, headers=headers) as session,
            session.get("/metrics") as answer,
        ):
            if answer.status != HTTPStatus.OK:
                raise ConfigError(f"/metrics of the served models answered {answer.status}; 200 is right")
            return count_jobs(await answer.text())

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
