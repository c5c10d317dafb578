"""`kvloom workload` from its options to files and tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvloom.bench.serve import INTERRUPTED, WIDTH
from kvloom.bench.tables import traffic_table
from kvloom.lab.workload.make import SPECS, open_workload
from kvloom.lab.workload.request import WorkloadRequest
from kvloom.lab.workload.summary import Traffic
from kvloom.lab.workload.traces import write_workload
from kvloom.types.errors import ConfigError
from kvloom.types.numbers import show_seconds

_STEP: Final = 1000  # requests from one look at the screen to the next


def make(options: argparse.Namespace) -> int:
    """Its exit code. Raises ConfigError."""
    if options.spec.suffix.lower() not in SPECS:
        raise ConfigError(f"{options.spec}: the path of a spec, in YAML or JSON, is right")
    workload = open_workload(options.spec, **({} if options.seed is None else {"seed": options.seed}))
    console = Console()
    try:
        with _counted(console, workload.requests()) as asks:
            count = write_workload(options.output, workload.header, asks)
    except KeyboardInterrupt:
        print("kvloom: interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED
    console.print(f"{options.output}: {count:,} requests", soft_wrap=True, markup=False, highlight=False)
    return 0


def show(options: argparse.Namespace) -> int:
    """Its exit code. Raises ConfigError."""
    workload = open_workload(options.file)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    try:
        with _counted(console, workload.requests()) as asks:
            traffic = Traffic(asks)
    except KeyboardInterrupt:
        return INTERRUPTED
    console.print(traffic_table(traffic, _title(options.file, traffic)))
    return 0


def _title(path: Path, traffic: Traffic) -> str:
    return f"{path.name}: {traffic.total.requests:,} requests in {show_seconds(traffic.seconds)}"


@contextmanager
def _counted(console: Console, asks: Iterable[WorkloadRequest]) -> Iterator[Iterator[WorkloadRequest]]:
    """The same, counted on the screen."""
    columns = SpinnerColumn(), TextColumn("{task.completed:,.0f} requests"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        step = progress.add_task("", total=None)

        def stream() -> Iterator[WorkloadRequest]:
            for number, ask in enumerate(asks):
                if number % _STEP == 0:
                    progress.update(step, completed=number)
                yield ask

        yield stream()
