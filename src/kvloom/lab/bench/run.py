"""`kvloom bench serve`: a workload is sent to a server, and its results are added up."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvloom.lab.bench.endpoint import Asking, Endpoint, Form, ServerError
from kvloom.lab.workload.make import faster
from kvloom.lab.workload.request import (
    Alone,
    Objective,
    Prompts,
    RequestResult,
    Scaled,
    Within,
    WorkloadRequest,
)
from kvloom.lab.workload.results import Results
from kvloom.lab.workload.summary import Histogram, ModelTraffic, Summary, Traffic
from kvloom.lab.workload.traces import Workload
from kvloom.serve.processes.parent import keep_out_of_collections
from kvloom.types.clock import Clock
from kvloom.types.errors import ConfigError

_FIRST: Final = 1 << 62  # numbers of probes, so that no prompt is a workload's
_REPEATS: Final = 3


def probes(models: Mapping[str, ModelTraffic]) -> dict[str, tuple[WorkloadRequest, WorkloadRequest]]:
    """Returns for each model a request with a short and one with a long prompt, both as the workload has
    them, and the usual answer."""
    found = {}
    for name, traffic in models.items():
        short, long = (max(1, int(tokens)) for tokens in traffic.prompt.quantiles((0.1, 0.9)))
        [output] = (max(2, int(tokens)) for tokens in traffic.output.quantiles((0.5,)))
        long = max(long, short + 1)
        found[name] = (
            WorkloadRequest(at=0.0, model=name, prompt=short, output=output),
            WorkloadRequest(at=0.0, model=name, prompt=long, output=output),
        )
    return found


async def measure(
    endpoint: Endpoint,
    pairs: Mapping[str, tuple[WorkloadRequest, WorkloadRequest]],
    clock: Clock,
    step: Callable[[str], None],
) -> dict[str, Alone]:
    """Measures one request at a time and takes the fastest of a few. Raises ServerError if one fails."""
    found = {}
    for name, (short, long) in pairs.items():
        step(name)
        best: list[RequestResult] = []
        for side, request in enumerate((short, long)):
            results = []
            for repeat in range(_REPEATS):
                body = endpoint.body(_FIRST + 2 * repeat + side, request)
                results.append(await endpoint.ask(request, body, clock.now()))
            best.append(_fastest(results))
        found[name] = fit(*best)
    return found


def fit(short: RequestResult, long: RequestResult) -> Alone:
    """Returns the latency that fits two answers without error."""
    firsts = [result.first or 0.0 for result in (short, long)]
    per_prompt = max(0.0, (firsts[1] - firsts[0]) / (long.request.prompt - short.request.prompt))
    start = max(0.0, firsts[0] - per_prompt * short.request.prompt)
    return Alone(start, per_prompt, max(short.per_token or 0.0, long.per_token or 0.0))


def _fastest(results: Iterable[RequestResult]) -> RequestResult:
    def latency(result: RequestResult) -> float:
        if result.error or result.end is None:
            raise ServerError(f"{result.request.model}: alone, too: {result.error or 'not one token came'}")
        return result.end

    return min(results, key=latency)


class Asked(Protocol):
    """The endpoint that requests are sent to."""

    def body(self, number: int, request: WorkloadRequest) -> bytes:
        """Returns the body for a workload's request `number`."""

    async def ask(self, request: WorkloadRequest, body: bytes, due: float) -> RequestResult:
        """Sends the request and returns its result, in seconds from `due` on the clock."""


async def drive(
    requests: Iterable[WorkloadRequest],
    endpoint: Asked,
    clock: Clock,
    sent: Callable[[], None],
    tell: Callable[[RequestResult], None],
) -> Histogram:
    """Returns by how many seconds requests were sent later than they were due. Asks come in order; a body is
    written before it is due. Memory is bounded in the requests that are over."""
    late = Histogram()

    async def one(request: WorkloadRequest, body: bytes, due: float) -> None:
        late.add(max(0.0, clock.now() - due))
        tell(await endpoint.ask(request, body, due))

    begin: float | None = None
    async with asyncio.TaskGroup() as group:
        for number, request in enumerate(requests):
            body = endpoint.body(number, request)
            begin = clock.now() if begin is None else begin
            due = begin + request.at
            await clock.sleep(max(0.0, due - clock.now()))
            group.create_task(one(request, body, due))
            sent()
            await asyncio.sleep(0)  # it goes out before the next body is written
    return late


@contextmanager
def _short_collections() -> Iterator[None]:
    """Keeps what is imported out of garbage collections meanwhile: each would take some 40 ms, for which the
    server would seem to stand still."""
    frozen = gc.get_freeze_count()
    keep_out_of_collections()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


ALL: Final = ""  # every model of a workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`models` are the endpoint's names for a workload's models; that of ALL is for those without one.
    `vocab` is None for the workload's own. `bounds` are the seconds that an answer may take, and `scales`
    multiples of its latency alone."""

    url: str
    key: str | None
    workload: Path
    rate_scale: float
    models: Mapping[str, str]
    form: Form
    exact: bool
    vocab: int | None
    timeout: float
    bounds: Within | None
    scales: tuple[float, ...]


class Bench:
    def __init__(self, run: Run, workload: Workload, console: Console, clock: Clock) -> None:
        self._run = run
        self._workload = workload
        self._console = console
        self._clock = clock

    async def results(self) -> Results:
        """Raises ConfigError for a workload that cannot be, before anything is sent, and ServerError."""
        run, header = self._run, self._workload.header
        with self._progress() as progress:
            step = progress.add_task("reading the workload", total=None, seen="")
            traffic = Traffic(self._requests())
            names = self._names(traffic)
            prompts = Prompts(run.vocab or header.vocab, header.seed)
            asking = Asking(prompts, names, run.form, run.exact)
            async with Endpoint(run.url, run.key, run.timeout, asking, self._clock) as endpoint:
                _check(names, await endpoint.served(), endpoint.url)
                objectives = await self._objectives(
                    endpoint, traffic, lambda text: progress.update(step, description=text)
                )
                summary = Summary(objectives)
                progress.update(step, description="asking", total=traffic.total.requests)
                seen = _Seen(lambda text: progress.update(step, advance=1, seen=text), self._clock)

                def tell(result: RequestResult) -> None:
                    summary.add(result)
                    seen.tell(result)

                with _short_collections():
                    began = time.process_time()
                    late = await drive(self._requests(), endpoint, self._clock, seen.sent, tell)
                    client_cpu = time.process_time() - began
        title = f"{header.name} at {endpoint.url}"
        return summary.results("benchmark", title, lateness=late, client_cpu=client_cpu)

    def _requests(self) -> Iterator[WorkloadRequest]:
        requests = self._workload.requests()
        return requests if self._run.rate_scale == 1.0 else faster(requests, self._run.rate_scale)

    def _names(self, traffic: Traffic) -> dict[str, str]:
        given = self._run.models
        for name in given:
            if name != ALL and name not in traffic.models:
                known = ", ".join(sorted(traffic.models))
                raise ConfigError(f"--model {name}: {self._run.workload} asks for {known}")
        return {name: given.get(name) or given.get(ALL) or name for name in sorted(traffic.models)}

    async def _objectives(
        self, endpoint: Endpoint, traffic: Traffic, step: Callable[[str], None]
    ) -> dict[str, Objective]:
        found: dict[str, Objective] = {}
        if self._run.bounds is not None:
            found["in time"] = self._run.bounds
        if self._run.scales:
            lone = await measure(
                endpoint,
                probes(traffic.models),
                self._clock,
                lambda model: step(f"measuring {model} alone"),
            )
            for scale in self._run.scales:
                found[f"≤ {scale:g}×"] = Scaled(scale, lambda request: lone[request.model].seconds(request))
        return found

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[seen]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )


class _Seen:
    """Tells how the run goes, in a few words."""

    def __init__(self, show: Callable[[str], None], clock: Clock) -> None:
        self._show = show
        self._clock = clock
        self._begin = clock.now()
        self._sent = self._over = self._errors = self._tokens = 0

    def sent(self) -> None:
        self._sent += 1

    def tell(self, result: RequestResult) -> None:
        self._over += 1
        self._errors += bool(result.error)
        self._tokens += result.tokens
        pace = self._tokens / max(self._clock.now() - self._begin, 1e-9)
        self._show(f"{self._sent - self._over} in flight, {self._errors} errors, {pace:,.0f} tok/s")


def _check(names: Mapping[str, str], served: list[str] | None, url: str) -> None:
    if served is not None:
        for name, remote in names.items():
            if remote not in served:
                said = f"is not served at {url}, which has {', '.join(served)}"
                raise ConfigError(f"model `{remote}` {said}; `--model {name}=NAME` is right")
