"""`kvloom reproduce`: a paper's experiments, in virtual time."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvloom.cli.app import Whole, check_outputs, interruptible
from kvloom.cli.tables import console_for
from kvloom.lab.reproduce.report import (
    Experiment,
    Options,
    Report,
    Scale,
    drawn,
    markdown,
    show_report,
    verdicts,
)
from kvloom.lab.workload.results import write_text
from kvloom.page.report import report_page
from kvloom.types.errors import ConfigError

app = App(name="reproduce")
Paper = Literal["aegaeon", "llumnix", "microserving", "muxserve", "weaver"]


@app.default
def reproduce(
    paper: Annotated[Paper, Parameter(help="whose experiments")],
    /,
    *,
    figure: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="N", help="only this figure, such as 3, table-1 or section-6.5; may be given again"
        ),
    ] = (),
    scale: Annotated[Scale, Parameter(help="small is for a quick look")] = "full",
    traffic: Annotated[
        str | None, Parameter(help="this workload, as prompt=S,output=L; each is S, M or L")
    ] = None,
    rate: Annotated[
        tuple[float, ...], Parameter(metavar="N", help="requests a second; may be given again")
    ] = (),
    draws: Annotated[Whole | None, Parameter(help="draws of requests, of which the mean is told")] = None,
    requests: Annotated[Whole | None, Parameter(help="requests of each draw")] = None,
    threshold: Annotated[
        tuple[float, ...],
        Parameter(metavar="N", help="a threshold of Llumnix's section 6.5; may be given again"),
    ] = (),
    json: Annotated[Path | None, Parameter(help="write what was found")] = None,
    page: Annotated[Path | None, Parameter(name="--markdown", help="write the tables for a page")] = None,
    html: Annotated[Path | None, Parameter(help="draw what was found as a page")] = None,
) -> None:
    """Run the experiments of a paper in virtual time.

    They run with kvloom's own engines, policies, pools and router programs; what the paper found is printed
    beside what is found here. No GPU is needed."""
    options = _options(traffic, rate, draws, requests, threshold)
    experiments = _chosen(paper, figure, options)
    check_outputs(json, page, html)
    console = console_for()
    with interruptible("nothing was written"), quiet(logging.getLogger("kvloom")):
        reports = [_show(experiment, scale, options, console) for experiment in experiments]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts(reports).items() if count)
    console.print(f"\n{paper}: {counts}")
    if json is not None:
        write_text(json, msgspec.json.format(msgspec.json.encode(reports)).decode() + "\n")
    if page is not None:
        write_text(page, "\n".join(map(markdown, reports)))
    if html is not None:
        said = f"Each number of the paper, in grey, above what is found here: {counts}."
        write_text(html, report_page(f"kvloom reproduce {paper}", said, map(drawn, reports)))


@contextmanager
def quiet(log: logging.Logger) -> Iterator[None]:
    """Silences warnings: papers overload their systems, and requests that find no room go elsewhere."""
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


_OPTIONS: Final = {
    "traffic": "--traffic",
    "rates": "--rate",
    "draws": "--draws",
    "requests": "--requests",
    "thresholds": "--threshold",
}


def _options(
    traffic: str | None,
    rates: tuple[float, ...],
    draws: int | None,
    requests: int | None,
    thresholds: tuple[float, ...],
) -> Options:
    """Raises ConfigError if a number is none of a workload."""
    numbers = {"--rate": rates, "--threshold": thresholds, "--draws": (draws,), "--requests": (requests,)}
    for option, values in numbers.items():
        for value in values:
            if value is not None and not (0 < value < inf):
                raise ConfigError(f"{option} {value:g}: more than 0 is right")
    return Options(traffic, rates, draws, requests, thresholds)


def _chosen(paper: str, figures: Sequence[str], options: Options) -> list[Experiment]:
    """Returns all experiments, or those that are named, in the paper's order. Raises ConfigError, also if one
    of them has no such options."""
    known: tuple[Experiment, ...] = import_module(f"kvloom.lab.reproduce.{paper}").EXPERIMENTS
    names = [experiment.name for experiment in known]
    figures = [figure.removeprefix("figure-") for figure in figures]
    for figure in figures:
        if figure not in names:
            raise ConfigError(f"--figure {figure[:40]!r}: not of {paper}; {', '.join(names)} are right")
    chosen = [experiment for experiment in known if not figures or experiment.name in figures]
    for experiment in chosen:
        for option in options.given:
            if option not in experiment.options:
                have = ", ".join(one.name for one in known if option in one.options)
                raise ConfigError(
                    f"{_OPTIONS[option]}: {paper}'s {experiment.name} has no such option; "
                    + (f"name one that has it by --figure: {have}" if have else "none of this paper has it")
                )
    return chosen


def run_with_progress(
    name: str, experiment: Experiment, scale: Scale, options: Options, console: Console
) -> Report:
    """Runs an experiment, with its progress on a terminal. `name` is what the reader sees."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        step = progress.add_task(name, total=1.0)

        def tell(what: str, part: float) -> None:
            progress.update(step, description=f"{name}: {what}", completed=part)

        return experiment.play(scale, tell, options)


def _show(experiment: Experiment, scale: Scale, options: Options, console: Console) -> Report:
    report = run_with_progress(experiment.name, experiment, scale, options, console)
    console.print(show_report(report))
    return report
