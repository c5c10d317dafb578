"""The real server under load: what its processes do besides jobs."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from kvloom.lab.profile.processes import all_threads_seconds, descendants, main_thread_seconds
from kvloom.lab.workload.arrivals import poisson
from kvloom.lab.workload.request import WorkloadRequest
from kvloom.lab.workload.results import Results, read_results
from kvloom.lab.workload.traces import VERSION, Header, write_workload
from kvloom.plan.cost.fit import fit_nonnegative
from kvloom.plan.cost.measured import ProfiledCostModel
from kvloom.plan.cost.profile import CpuOverhead, Role
from kvloom.plan.cost.work import Work
from kvloom.serve.local import ENGINE_MODULE, GATEWAY_MODULE
from kvloom.types.errors import ConfigError

FEWEST_REQUESTS, MOST_REQUESTS = 4, 200  # requests of each model in a load


class Bounds(NamedTuple):
    """Bounds what a load may ask of a model: the tokens of one request, and the requests that may wait."""

    context: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that come at random moments, with prompts and answers of so many tokens."""

    busy: float
    """The load, as the part of the time for which jobs would run if each had one sequence; it is more than 1
    if they are to run together."""
    output: int
    prompt: int = 64

    def requests(
        self, cost: ProfiledCostModel, bounds: Mapping[str, Bounds], seconds: float
    ) -> list[WorkloadRequest]:
        """Returns about so many seconds of requests, of each model as many in turn. bounds: those of each
        model."""
        context = min(bound.context for bound in bounds.values())
        prompt = max(1, min(self.prompt, context // 2))
        output = min(self.output, context - prompt)
        jobs = [Work.decode(model, 1.0, [prompt]) for model in bounds] * (output - 1)
        jobs += [Work.prefill(model, 1.0, [prompt]) for model in bounds]
        gap = sum(cost.seconds(job) + cost.engine_gap(job) for job in jobs) / len(bounds) / self.busy
        most = min(bound.waiting for bound in bounds.values())
        each = min(most, MOST_REQUESTS, max(FEWEST_REQUESTS, round(seconds / gap / len(bounds))))
        moments = (gap * np.cumsum(poisson(np.random.default_rng(0), each * len(bounds)))).tolist()
        return [
            WorkloadRequest(at=at, model=model, prompt=prompt, output=output)
            for at, model in zip(moments, itertools.cycle(bounds), strict=False)
        ]


LOADS: Final = (
    Load(0.5, 24),
    Load(0.25, 2),
    Load(0.25, 80),
    Load(1.2, 24),
    Load(2.0, 80),
    Load(1.2, 24, prompt=256),
)
"""Loads by which the costs of a request, of tokens of prompts and answers, and of a turn can be told apart:
few sequences at a time, and many."""

LEAST: Final = 1e-9  # seconds; a fit by ratios wants more than 0


@dataclass(frozen=True, slots=True)
class EngineGaps:
    """The seconds between an engine's jobs, in which it works itself."""

    step: Callable[[int], float]
    """Returns the seconds after a step of so many sequences."""
    prefill: float
    """The seconds that come on top of that around a job with prompts."""


@dataclass(frozen=True, slots=True)
class Jobs:
    """How many jobs all engines have run, and in how many of them there were prompts."""

    all: float
    prompted: float

    def __sub__(self, before: Jobs) -> Jobs:
        return Jobs(self.all - before.all, self.prompted - before.prompted)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The measurements under one load."""

    requests: int
    prompts: int
    """The tokens of all prompts."""
    tokens: int
    """The tokens of all answers."""
    turns: float
    """How many times tokens came, however many at a time: the jobs."""
    cpu: Mapping[Role, float]
    """The CPU seconds of each role; the engines' are without the gaps between their jobs."""


def split_cpu_time(loads: Sequence[Loaded]) -> tuple[CpuOverhead, ...]:
    """Splits each role's CPU seconds into costs per request, per token of prompts and of answers, and per
    turn, by least squares."""
    return tuple(_role_costs(role, loads) for role in ("client", "gateway", "engine"))


def _role_costs(role: Role, loads: Sequence[Loaded]) -> CpuOverhead:
    features = np.array([[load.requests, load.prompts, load.tokens, load.turns] for load in loads], float)
    seconds = np.array([max(load.cpu[role], LEAST) for load in loads])
    request, prompt, token, turn = fit_nonnegative(features, seconds).tolist()
    return CpuOverhead(role=role, request=request, prompt=prompt, token=token, turn=turn)


KEY_VARIABLE: Final = "KVLOOM_API_KEY"  # that `kvloom bench serve` reads
JOBS: Final = {"kvloom_prefill_jobs": 1, "kvloom_decode_jobs": 1, "kvloom_mixed_jobs": -1}
"""Metrics that together count jobs: a mixed one counts as a prefill and as a decode step, too."""
PROMPTED: Final = "kvloom_prefill_jobs"
WARMING: Final = 32  # requests
MAX_GAP_PART: Final = 0.9  # the part of its loop's CPU time that an engine's gaps are at most
READY: Final = re.compile(r"Ready in .*?(http://\S+)")
START_TIMEOUT: Final = 600.0  # seconds for the server to start


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


async def measure_serving(
    arguments: Sequence[str],
    key: str | None,
    gaps: EngineGaps,
    loads: Sequence[Sequence[WorkloadRequest]],
    tell: Callable[[str], None],
) -> tuple[CpuOverhead, ...]:
    """Returns what the server's threads and the client do besides jobs, by `loads`.

    `arguments` are those with which `kvloom serve` serves these models. `gaps` are those between an engine's
    jobs, whose CPU time is left out. Each load is sent by `kvloom bench serve` in a process of its own. The
    first requests are sent once more before all others, so that what is done only once is not measured.
    Raises ConfigError if the server does not start, or leaves a request without an answer."""
    found = list[Loaded]()
    with tempfile.TemporaryDirectory(prefix="kvloom-") as folder:
        tell("the server starts")
        async with _served(arguments) as server:
            client = _Client(server.url, key, Path(folder))
            for number, load in enumerate((loads[0][:WARMING], *loads)):
                what = f"load {number} of {len(loads)}" if number else "to warm up"
                tell(f"{what}: {len(load)} requests of {load[0].prompt} and {load[0].output} tokens")
                found.append(await _loaded(server, client, load, gaps))
    return split_cpu_time(found[1:])


async def _loaded(
    server: Server, client: _Client, requests: Sequence[WorkloadRequest], gaps: EngineGaps
) -> Loaded:
    """Returns what a load was measured to take."""
    before, spent = await client.jobs(), server.cpu()
    results = await client.ask(requests)
    cpu = {role: after - spent[role] for role, after in server.cpu().items()}
    jobs, total = await client.jobs() - before, results.total
    if jobs.all <= 0 or results.client_cpu is None:
        raise ConfigError(f"the served models counted {jobs.all:.0f} jobs for {total.requests} requests")
    in_gaps = jobs.all * gaps.step(round(total.output_tokens / jobs.all)) + jobs.prompted * gaps.prefill
    cpu["engine"] -= min(in_gaps, MAX_GAP_PART * cpu["engine"])
    cpu["client"] = results.client_cpu
    prompts = sum(request.prompt for request in requests)
    return Loaded(total.requests, prompts, total.output_tokens, jobs.all, cpu)


def count_jobs(metrics: str) -> Jobs:
    """Returns what `/metrics` says of the jobs that were run."""
    counts = {
        family.name: sum(sample.value for sample in family.samples if sample.name == f"{family.name}_total")
        for family in text_string_to_metric_families(metrics)
        if family.name in JOBS
    }
    return Jobs(sum(JOBS[name] * count for name, count in counts.items()), counts.get(PROMPTED, 0.0))


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

    async def jobs(self) -> Jobs:
        """Returns which jobs the server's engines have run up to now."""
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
