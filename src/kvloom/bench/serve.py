"""`kvloom bench serve` from its options to its files."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from kvloom.bench.command import KEY_VARIABLE
from kvloom.bench.tables import results_table
from kvloom.lab.bench.endpoint import ServerError
from kvloom.lab.bench.run import ALL, Bench, Run
from kvloom.lab.workload.make import open_workload
from kvloom.lab.workload.page import page
from kvloom.lab.workload.request import Within
from kvloom.lab.workload.results import Results, show_upheaval, write_text
from kvloom.serve.ground import raise_open_files
from kvloom.sizes import parse_seconds
from kvloom.types.clock import WallClock
from kvloom.types.errors import ConfigError
from kvloom.types.numbers import show_seconds

SERVER_ERROR, INTERRUPTED = 1, 130
MOST_ERRORS: Final = 5  # kinds shown
LATE: Final = 0.010  # seconds
WIDTH: Final = 160  # of a table that goes to no terminal
_BOUNDS: Final = ("first", "per_token", "end")


def serve(options: argparse.Namespace) -> int:
    """Its exit code. Raises ConfigError."""
    run = read_options(options)
    workload = open_workload(run.workload)
    check_outputs(options.json, options.html)
    raise_open_files()
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    try:
        results = asyncio.run(Bench(run, workload, console, WallClock()).results())
    except ServerError as error:
        print(f"kvloom: {error}", file=sys.stderr)
        return SERVER_ERROR
    except KeyboardInterrupt:
        print("kvloom: interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED
    show(results, console)
    if options.json is not None:
        results.save(options.json)
    if options.html is not None:
        write_text(options.html, page(results))
    return SERVER_ERROR if results.total.errors == results.total.requests else 0


def check_outputs(*paths: Path | None) -> None:
    """Before there is anything to write. Raises ConfigError."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: no such folder; a path that can be written is right")


def show(results: Results, console: Console) -> None:
    console.print(results_table(results))
    for kind, count in sorted(results.errors.items(), key=lambda pair: -pair[1])[:MOST_ERRORS]:
        console.print(Text(f"{count:,} × {kind}", style="red"), soft_wrap=True)
    if results.upheaval is not None:
        console.print(Text(show_upheaval(results.upheaval), style="dim"), soft_wrap=True)
    if (late := results.lateness) is not None:
        told = f"requests were sent {show_seconds(late.p99)} late (P99), {show_seconds(late.most)} at most"
        console.print(Text(told, style="yellow" if late.p99 > LATE else "dim"), soft_wrap=True)


def read_options(options: argparse.Namespace) -> Run:
    """Raises ConfigError."""
    if not (0 < options.rate_scale <= 1e6):
        raise ConfigError(f"--rate-scale {options.rate_scale:g}: more than 0 is right")
    if options.vocab is not None and not 32 <= options.vocab < 2**31:
        raise ConfigError(f"--vocab {options.vocab}: 32 or more is right")
    for scale in options.slo_scale:
        if not (0 < scale < math.inf):
            raise ConfigError(f"--slo-scale {scale:g}: more than 0 is right")
    return Run(
        url=options.url,
        key=options.key or os.environ.get(KEY_VARIABLE),
        workload=options.workload,
        rate_scale=options.rate_scale,
        models=_models(options.model),
        form=options.prompts,
        exact=not options.plain,
        vocab=options.vocab,
        timeout=_seconds("--timeout", options.timeout),
        bounds=_bounds(options.slo),
        scales=tuple(dict.fromkeys(options.slo_scale)),
    )


def _models(texts: Sequence[str]) -> dict[str, str]:
    """NAME=REMOTE, or REMOTE for all others."""
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
