"""Many runs with faults, up to the first that breaks a law."""

from __future__ import annotations

import logging
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvloom.core.errors import ConfigError
from kvloom.sim.chaos import Verdict, run_seed

BROKEN, INTERRUPTED = 1, 130
MOST_JOBS: Final = 256
_AHEAD: Final = 10  # runs that a process is given at once
_WINDOW: Final = 5000  # that all are; so there may be any number


def chaos(*, seeds: int, first: int, jobs: int, replay: int | None) -> int:
    """The command's exit code. Raises ConfigError."""
    _check(seeds, first, jobs, replay)
    console = Console() if sys.stdout.isatty() else Console(width=160)
    if replay is not None:
        return tell(run_quietly(replay, journal=True))
    try:
        counts, broken = _run_all(range(first, first + seeds), jobs, console)
    except KeyboardInterrupt:
        print("kvloom: interrupted", file=sys.stderr)
        return INTERRUPTED
    if broken is not None:
        return tell(run_quietly(broken.seed, journal=True))
    console.print(_summary(seeds, counts))
    return 0


def _check(seeds: int, first: int, jobs: int, replay: int | None) -> None:
    if seeds < 1:
        raise ConfigError(f"--seeds: {seeds}; 1 or more is right")
    for flag, seed in (("--first", first), ("--replay", replay)):
        if seed is not None and seed < 0:
            raise ConfigError(f"{flag}: {seed}; a seed of 0 or more is right")
    if not 1 <= jobs <= MOST_JOBS:
        raise ConfigError(f"--jobs: {jobs}; 1 to {MOST_JOBS} is right")


def run_quietly(seed: int, *, journal: bool = False) -> Verdict:
    """What the engines log of failed jobs is as the seed has it, and would bury the rest."""
    logging.disable(logging.CRITICAL)
    try:
        return run_seed(seed, journal=journal)
    finally:
        logging.disable(logging.NOTSET)


def verdicts(seeds: range, jobs: int) -> Iterator[Verdict]:
    """In order, from `jobs` processes."""
    if jobs == 1:
        yield from map(run_quietly, seeds)
        return
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    try:
        for first in range(0, len(seeds), _WINDOW):
            with _without_interrupts():
                found = pool.map(run_quietly, seeds[first : first + _WINDOW], chunksize=_AHEAD)
            yield from found
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C goes to all processes, and the first one ends the others: those that are started here never hear
    it, from their first moment on. For this one it waits until the block ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def tell(verdict: Verdict) -> int:
    """The journal and the verdict, on standard output; the exit code."""
    for line in verdict.lines:
        print(line)
    for broken in verdict.broken:
        print(f"seed {verdict.seed} breaks {broken}")
    if not verdict.broken:
        print(f"seed {verdict.seed} keeps the laws")
    return BROKEN if verdict.broken else 0


def _run_all(seeds: range, jobs: int, console: Console) -> tuple[Counter[str], Verdict | None]:
    """What happened, and the first run that broke a law."""
    counts: Counter[str] = Counter()
    columns = TextColumn("seeds"), BarColumn(), TextColumn("{task.completed}/{task.total}")
    quiet = not console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=quiet) as progress:
        step = progress.add_task("", total=len(seeds))
        for verdict in verdicts(seeds, jobs):
            if verdict.broken:
                return counts, verdict
            counts.update(verdict.counts)
            progress.advance(step)
    return counts, None


def _summary(seeds: int, counts: Counter[str]) -> Table:
    table = Table(title=f"{seeds} runs keep the laws", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for what, count in sorted(counts.items()):
        table.add_row(what, f"{count:,}")
    return table
