"""Workloads and results as tables for a person."""

from __future__ import annotations

from rich.table import Table

from kvloom.lab.workload.results import Latency, Results, Tally
from kvloom.lab.workload.summary import Histogram, ModelTraffic, Traffic
from kvloom.types.numbers import show_number, show_seconds

MOST_ROWS = 40


def traffic_table(traffic: Traffic, title: str) -> Table:
    """Tokens as mean and P50 / P80 / P95 / P99."""
    table = Table(title=title, title_justify="left")
    table.add_column("model")
    for head in ("requests", "per second", "CV of gaps", "prompt", "output", "priorities"):
        table.add_column(head, justify="right")
    models = sorted(traffic.models.items(), key=lambda pair: -pair[1].requests)
    for name, model in models[:MOST_ROWS]:
        table.add_row(name, *_traffic_cells(model, traffic.rate(model)))
    if len(models) > MOST_ROWS:
        table.add_row(f"{len(models) - MOST_ROWS} more")
    if len(models) > 1:
        table.add_section()
        table.add_row("all", *_traffic_cells(traffic.total, traffic.rate(traffic.total)))
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
    """Latencies as P50 / P99."""
    table = Table(title=results.title, title_justify="left")
    table.add_column("model")
    for head in ("requests", "errors", "req/s", "tok/s", "TTFT", "per token", "end to end"):
        table.add_column(head, justify="right")
    for name in results.total.attained:
        table.add_column(name, justify="right")
    models = sorted(results.models.items(), key=lambda pair: -pair[1].requests)
    for name, tally in models[:MOST_ROWS]:
        table.add_row(name, *_tally_cells(tally))
    if len(models) > MOST_ROWS:
        table.add_row(f"{len(models) - MOST_ROWS} more")
    if len(models) > 1:
        table.add_section()
        table.add_row("all", *_tally_cells(results.total))
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


def _points(latency: Latency | None) -> str:
    return "–" if latency is None else f"{show_seconds(latency.p50)} / {show_seconds(latency.p99)}"
