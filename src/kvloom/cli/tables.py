"""Workloads and results as commands print them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvloom.lab.workload.results import Latency, Results, Tally, show_fleet_events
from kvloom.lab.workload.summary import Histogram, ModelTraffic, Traffic
from kvloom.types.numbers import show_number, show_seconds

Row = TypeVar("Row", ModelTraffic, Tally)
MOST_ROWS: Final = 40
MOST_ERRORS: Final = 5  # kinds shown
LATE: Final = 0.010  # seconds
BUSY: Final = 0.9  # cores of a client, which has one thread


def console_for(width: int = 160) -> Console:
    """Returns the console for standard output, of that width if it is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=width)


def show_results(results: Results, console: Console) -> None:
    """Prints the latencies of each model, the most frequent errors, and what else happened."""
    console.print(results_table(results))
    for kind, count in sorted(results.errors.items(), key=lambda pair: -pair[1])[:MOST_ERRORS]:
        console.print(Text(f"{count:,} × {kind}", style="red"), soft_wrap=True)
    if results.fleet_events is not None:
        console.print(Text(show_fleet_events(results.fleet_events), style="dim"), soft_wrap=True)
    if (late := results.lateness) is not None:
        told = f"requests were sent {show_seconds(late.p99)} late (P99), {show_seconds(late.most)} at most"
        if (cores := results.client_cores) is not None:
            told += f"; the client used {cores:.2f} cores"
        busy = late.p99 > LATE or (cores or 0.0) > BUSY
        console.print(Text(told, style="yellow" if busy else "dim"), soft_wrap=True)


def traffic_table(traffic: Traffic, title: str) -> Table:
    """Returns what each model is asked for, with tokens as mean: P50 / P80 / P95 / P99."""
    table = Table(title=title, title_justify="left")
    table.add_column("model")
    for head in ("requests", "per second", "CV of gaps", "prompt", "output", "priorities"):
        table.add_column(head, justify="right")
    _fill(table, traffic.models, traffic.total, lambda model: _traffic_cells(model, traffic.rate(model)))
    return table


def _traffic_cells(model: ModelTraffic, rate: float) -> list[str]:
    priorities = sorted(model.priorities.items())
    shown = ", ".join(f"{priority}: {count / model.requests:.0%}" for priority, count in priorities[:4])
    return [
        f"{model.requests:,}",
        show_number(rate),
        "–" if model.cv is None else f"{model.cv:.2f}",
        _tokens(model.prompt),
        _tokens(model.output),
        shown if len(priorities) > 1 or priorities[0][0] else "",
    ]


def _tokens(found: Histogram) -> str:
    points = found.quantiles((0.5, 0.8, 0.95, 0.99))
    return f"{found.mean:,.0f}: {' / '.join(f'{round(point):,}' for point in points)}"


def results_table(results: Results) -> Table:
    """Returns what came of each model's requests, with latencies as P50 / P99."""
    caption = "Latencies are P50 / P99. Rates are until the last answer."
    table = Table(title=results.title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("model")
    for head in ("requests", "errors", "req/s", "tok/s", "TTFT", "per token", "end to end"):
        table.add_column(head, justify="right")
    for name in results.total.attained:
        table.add_column(name, justify="right")
    _fill(table, results.models, results.total, _tally_cells)
    return table


def _tally_cells(tally: Tally) -> list[str]:
    return [
        f"{tally.requests:,}",
        f"{tally.errors:,}",
        show_number(tally.requests_per_second),
        show_number(tally.tokens_per_second),
        *(_points(latency) for latency in (tally.first, tally.per_token, tally.end)),
        *(f"{share:.1%}" for share in tally.attained.values()),
    ]


def _fill(table: Table, models: Mapping[str, Row], total: Row, cells: Callable[[Row], list[str]]) -> None:
    """Adds a row for each model, the most asked first, and one for all of them."""
    ranked = sorted(models.items(), key=lambda pair: -pair[1].requests)
    for name, model in ranked[:MOST_ROWS]:
        table.add_row(name, *cells(model))
    if len(ranked) > MOST_ROWS:
        table.add_row(f"{len(ranked) - MOST_ROWS} more")
    if len(ranked) > 1:
        table.add_section()
        table.add_row("all", *cells(total))


def _points(latency: Latency | None) -> str:
    return "–" if latency is None else f"{show_seconds(latency.p50)} / {show_seconds(latency.p99)}"
