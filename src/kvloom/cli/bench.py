"""`kvloom bench` asks a server what a workload asks for; `kvloom workload` makes workloads and shows them."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvloom.cli.app import (
    API_KEY_VARIABLE,
    DEFAULT_URL,
    FAILED,
    ApiKey,
    CommandFailed,
    Output,
    Url,
    Whole,
    check_outputs,
    interruptible,
)
from kvloom.cli.tables import console_for, show_results, traffic_table
from kvloom.config.fields import parse_seconds
from kvloom.lab.bench.endpoint import Form, ServerError
from kvloom.lab.bench.run import ALL, Bench, Run
from kvloom.lab.workload.make import SPECS, open_workload
from kvloom.lab.workload.page import page
from kvloom.lab.workload.request import Within, WorkloadRequest
from kvloom.lab.workload.results import Results, read_results, write_text
from kvloom.lab.workload.summary import Traffic
from kvloom.lab.workload.traces import write_workload
from kvloom.serve.machine import raise_open_files
from kvloom.types.clock import WallClock
from kvloom.types.errors import ConfigError
from kvloom.types.numbers import show_seconds

_BOUNDS: Final = ("first", "per_token", "end")
_STEP: Final = 1000  # requests from one look at the screen to the next

bench = App(name="bench", help="Measure a server under a workload, and draw the results.")
workload = App(name="workload", help="Make a workload, or show what one asks for.")

WorkloadFile = Annotated[Path, Parameter(help="a workload, a spec of one, or a trace")]
RateScale = Annotated[float, Parameter(metavar="X", help="X times the workload's rate")]
SloScales = Annotated[
    tuple[float, ...],
    Parameter(metavar="X", help="count answers within X times what they take alone; may be given again"),
]
JsonFile = Annotated[Path | None, Parameter(help="write the results")]
HtmlFile = Annotated[Path | None, Parameter(help="draw the results as a page")]


@bench.command
def serve(
    *,
    url: Url = DEFAULT_URL,
    workload: WorkloadFile,
    rate_scale: RateScale = 1.0,
    model: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="NAME=REMOTE",
            help="the server's name for a model of the workload, or, without NAME=, for all others; may be "
            "given again",
        ),
    ] = (),
    key: ApiKey = None,
    prompts: Annotated[Form, Parameter(help="what prompts are sent as")] = "tokens",
    vocab: Annotated[Whole | None, Parameter(metavar="N", help="token ids below N (the workload's)")] = None,
    plain: Annotated[
        bool, Parameter(help="send OpenAI's own parameters alone: answers may end early")
    ] = False,
    timeout: Annotated[str, Parameter(metavar="TIME", help="how long a request may take")] = "600s",
    slo: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="WHAT=TIME",
            help="count answers in time: first, per_token and end, as `--slo first=200ms --slo end=5s`",
        ),
    ] = (),
    slo_scale: SloScales = (),
    json: JsonFile = None,
    html: HtmlFile = None,
) -> int:
    """Ask an OpenAI endpoint, kvloom's or another's, what a workload asks for.

    Each request is sent at its time, whatever became of those before. Prompts are sent to /v1/completions as
    token ids; answers are streamed, and as long as the workload has them. Latencies count from when a request
    was due."""
    check_scales(rate_scale, slo_scale)
    if rate_scale > 1e6:
        raise ConfigError(f"--rate-scale {rate_scale:g}: 1000000 at most is right")
    if vocab is not None and not 32 <= vocab < 2**31:
        raise ConfigError(f"--vocab {vocab}: 32 or more is right")
    run = Run(
        url=url,
        key=key or os.environ.get(API_KEY_VARIABLE),
        workload=workload,
        rate_scale=rate_scale,
        models=_models(model),
        form=prompts,
        exact=not plain,
        vocab=vocab,
        timeout=_seconds("--timeout", timeout),
        bounds=_bounds(slo),
        scales=tuple(dict.fromkeys(slo_scale)),
    )
    asked = open_workload(workload)
    check_outputs(json, html)
    raise_open_files()
    console = console_for()
    try:
        with interruptible("nothing was written"):
            results = asyncio.run(Bench(run, asked, console, WallClock()).results())
    except ServerError as error:
        raise CommandFailed(str(error)) from error
    return write_results(results, console, json, html)


@bench.command(name="page")
def draw_page(
    results: Annotated[Path, Parameter(help="what --json wrote")],
    /,
    *,
    output: Output,
) -> None:
    """Draw the results of a benchmark or of a simulation as one HTML page, which needs nothing else."""
    write_text(output, page(read_results(results)))


def check_scales(rate_scale: float, slo_scales: Sequence[float]) -> None:
    """Raises ConfigError if one of the factors is none."""
    for flag, scales in (("--rate-scale", (rate_scale,)), ("--slo-scale", slo_scales)):
        for scale in scales:
            if not (0 < scale < math.inf):
                raise ConfigError(f"{flag} {scale:g}: more than 0 is right")


def write_results(results: Results, console: Console, json: Path | None, html: Path | None) -> int:
    """Shows the results and writes them if that is wanted. Returns the exit code, which says whether any
    request was answered."""
    show_results(results, console)
    if json is not None:
        results.save(json)
    if html is not None:
        write_text(html, page(results))
    return 0 if results.total.requests > results.total.errors else FAILED


def _models(texts: Sequence[str]) -> dict[str, str]:
    """Reads NAME=REMOTE, or REMOTE for all others. Raises ConfigError."""
    models: dict[str, str] = {}
    for text in texts:
        name, equals, remote = text.partition("=") if "=" in text else (ALL, "", text)
        if not remote or (equals and not name):
            raise ConfigError(f"--model {text}: NAME=REMOTE or REMOTE is right")
        if name in models:
            raise ConfigError(f"--model {text}: {name or 'the name for all others'} is given twice")
        models[name] = remote
    return models


def _bounds(texts: Sequence[str]) -> Within | None:
    bounds: dict[str, float] = {}
    for text in texts:
        what, _, seconds = text.partition("=")
        if what not in _BOUNDS or what in bounds:
            raise ConfigError(f"--slo {text}: {', '.join(_BOUNDS)}, each once, are right, as `first=200ms`")
        if not seconds:
            raise ConfigError(f"--slo {text}: {what}=TIME is right, as `{what}=200ms`")
        bounds[what] = _seconds(f"--slo {what}", seconds)
    return Within(**bounds) if bounds else None


def _seconds(flag: str, text: str) -> float:
    try:
        seconds = parse_seconds(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from error
    if not seconds:
        raise ConfigError(f"{flag}: {text}; more than 0 is right")
    return seconds


@workload.command
def make(
    spec: Annotated[Path, Parameter(help="see docs/workloads.md")],
    /,
    *,
    output: Output,
    seed: Annotated[Whole | None, Parameter(help="instead of the spec's")] = None,
) -> None:
    """Make a workload, which is a file with one request a line.

    Its models, rates, lengths and beginnings are those that a spec describes, or of a trace that the spec
    names. The same spec makes the same file."""
    if spec.suffix.lower() not in SPECS:
        raise ConfigError(f"{spec}: the path of a spec, in YAML or JSON, is right")
    made = open_workload(spec, **({} if seed is None else {"seed": seed}))
    console = Console()
    with interruptible("nothing was written"), _counted(console, made.requests()) as asks:
        count = write_workload(output, made.header, asks)
    console.print(f"{output}: {count:,} requests", soft_wrap=True, markup=False, highlight=False)


@workload.command
def show(file: WorkloadFile, /) -> None:
    """Show what a workload, a spec or a trace asks for.

    The table tells rates, and tokens as mean: P50 / P80 / P95 / P99."""
    console = console_for()
    with _counted(console, open_workload(file).requests()) as asks:
        traffic = Traffic(asks)
    title = f"{file.name}: {traffic.total.requests:,} requests in {show_seconds(traffic.seconds)}"
    console.print(traffic_table(traffic, title))


@contextmanager
def _counted(console: Console, asks: Iterable[WorkloadRequest]) -> Iterator[Iterator[WorkloadRequest]]:
    """Gives the same requests, which are counted on the screen."""
    columns = SpinnerColumn(), TextColumn("{task.completed:,.0f} requests"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        step = progress.add_task("", total=None)

        def stream() -> Iterator[WorkloadRequest]:
            for number, ask in enumerate(asks):
                if number % _STEP == 0:
                    progress.update(step, completed=number)
                yield ask

        yield stream()
