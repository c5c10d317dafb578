"""`kvloom reproduce` from its options to its files."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvloom.lab.reproduce.report import Experiment, Report, Scale, markdown, show_report, verdicts
from kvloom.lab.workload.results import write_text
from kvloom.types.errors import ConfigError

INTERRUPTED: Final = 130
WIDTH: Final = 160  # of a table that goes to no terminal


def conduct(paper: str, figures: Sequence[str], scale: Scale, json: Path | None, page: Path | None) -> int:
    """Its exit code. Raises ConfigError."""
    experiments = _chosen(paper, figures)
    for path in (json, page):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: no such folder; a path that can be written is right")
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    try:
        with _quiet(logging.getLogger("kvloom")):
            reports = [_run(experiment, scale, console) for experiment in experiments]
    except KeyboardInterrupt:
        print("kvloom: interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts(reports).items() if count)
    console.print(f"\n{paper}: {counts}")
    if json is not None:
        write_text(json, msgspec.json.format(msgspec.json.encode(reports)).decode() + "\n")
    if page is not None:
        write_text(page, "\n".join(map(markdown, reports)))
    return 0


@contextmanager
def _quiet(log: logging.Logger) -> Iterator[None]:
    """Without its warnings: papers overload their systems, and requests that find no room go elsewhere."""
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _chosen(paper: str, figures: Sequence[str]) -> list[Experiment]:
    """All, or those that are named, in the paper's order. Raises ConfigError."""
    known: tuple[Experiment, ...] = import_module(f"kvloom.lab.reproduce.{paper}").EXPERIMENTS
    names = [experiment.name for experiment in known]
    for figure in figures:
        if figure not in names:
            raise ConfigError(f"--figure {figure[:40]!r}: not of {paper}; {', '.join(names)} are right")
    return [experiment for experiment in known if not figures or experiment.name in figures]


def _run(experiment: Experiment, scale: Scale, console: Console) -> Report:
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        step = progress.add_task(experiment.name, total=1.0)

        def tell(what: str, part: float) -> None:
            progress.update(step, description=f"{experiment.name}: {what}", completed=part)

        report = experiment.run(scale, tell)
    console.print(show_report(report))
    return report
