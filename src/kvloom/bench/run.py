"""`kvloom bench serve`: a workload asked of a server, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvloom.bench.alone import measure, probes
from kvloom.bench.drive import drive
from kvloom.bench.endpoint import Asking, Endpoint, Form
from kvloom.types.clock import Clock
from kvloom.types.errors import ConfigError
from kvloom.workload.ask import Ask, Outcome
from kvloom.workload.files import Workload
from kvloom.workload.objectives import Objective, Scaled, Within
from kvloom.workload.prompts import Prompts
from kvloom.workload.replay import faster
from kvloom.workload.results import Results
from kvloom.workload.summary import Summary
from kvloom.workload.traffic import Traffic

ALL: Final = ""  # every model of a workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """models: the endpoint's names for a workload's models; that of ALL is for those without one. vocab: None
    for the workload's. bounds: seconds that an answer may take; scales: multiples of its latency alone."""

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
            traffic = Traffic(self._asks())
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

                def tell(outcome: Outcome) -> None:
                    summary.add(outcome)
                    seen.tell(outcome)

                late = await drive(self._asks(), endpoint, self._clock, seen.sent, tell)
        return summary.results("benchmark", f"{header.name} at {endpoint.url}", lateness=late)

    def _asks(self) -> Iterator[Ask]:
        asks = self._workload.asks()
        return asks if self._run.rate_scale == 1.0 else faster(asks, self._run.rate_scale)

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
                found[f"≤ {scale:g}×"] = Scaled(scale, lambda ask: lone[ask.model].seconds(ask))
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
    """How the run goes, in a few words."""

    def __init__(self, show: Callable[[str], None], clock: Clock) -> None:
        self._show = show
        self._clock = clock
        self._begin = clock.now()
        self._sent = self._over = self._errors = self._tokens = 0

    def sent(self) -> None:
        self._sent += 1

    def tell(self, outcome: Outcome) -> None:
        self._over += 1
        self._errors += bool(outcome.error)
        self._tokens += outcome.tokens
        pace = self._tokens / max(self._clock.now() - self._begin, 1e-9)
        self._show(f"{self._sent - self._over} in flight, {self._errors} errors, {pace:,.0f} tok/s")


def _check(names: Mapping[str, str], served: list[str] | None, url: str) -> None:
    if served is not None:
        for name, remote in names.items():
            if remote not in served:
                said = f"is not served at {url}, which has {', '.join(served)}"
                raise ConfigError(f"model `{remote}` {said}; `--model {name}=NAME` is right")
