"""`kvloom traffic` shows what a fleet was asked, and makes the demand for a plan of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter
from rich.table import Table

from kvloom.cli.admin import HERE, ServerOptions
from kvloom.cli.app import CommandFailed, Whole
from kvloom.cli.gateway import AdminClient, GatewayError
from kvloom.cli.tables import console_for
from kvloom.journal.traffic import (
    HOUR,
    MINUTES,
    TrafficHour,
    add_up,
    decode_hours,
    encode_hours,
    quantile,
    rebuild,
)
from kvloom.plan.traffic import LEAST_REQUESTS, LEAST_SECONDS, At, SeenTraffic, covered_seconds, seen_traffic
from kvloom.types.errors import ConfigError
from kvloom.types.numbers import show_count, show_number

DAY: Final = 24
AtOption = Annotated[At, Parameter(help="plan for the busiest hour of the traffic, or for the mean of all")]

app = App(name="traffic")


@app.default
def traffic_command(
    *,
    hours: Annotated[Whole, Parameter(help="how many to show; 0 for all that are kept")] = DAY,
    json: Annotated[
        bool, Parameter(negative=(), help="print lines of JSON, which `kvloom plan --from-traffic` reads")
    ] = False,
    server: ServerOptions = HERE,
) -> None:
    """Show what a fleet was asked, by model and hour.

    Only counts and lengths are kept, for 35 days. Tokens are shown as mean: P50 / P95; these are less than a
    factor of two from the true ones. Burstiness is the variance of the requests a minute over their mean: 1
    if they arrive at random, more if they come in bursts. Of an hour in which the log begins, or that is not
    over, requests per second are those of the minutes that the log has."""
    if hours < 0:
        raise ConfigError(f"--hours: {hours}; 0 or more is right")
    with server.asked() as gateway:
        found = gateway.traffic()
    now = time.time()
    since = now - (hours + 1) * HOUR if hours else 0.0
    shown = [hour for hour in found if hour.hour > since]
    if json:
        sys.stdout.write(encode_hours(shown).decode())
    else:
        console_for().print(traffic_table(shown, covered_seconds(found, now)))


def traffic_table(hours: Sequence[TrafficHour], covered: Mapping[int, int]) -> Table:
    """Returns a row for each model and hour. `covered` has the seconds of each hour that the log has."""
    table = Table(title="Traffic, by hours of UTC", title_justify="left")
    for head in ("hour", "model"):
        table.add_column(head)
    for head in (
        *("requests", "unanswered", "per second", "peak minute", "burstiness"),
        *("prompt", "output", "cached"),
    ):
        table.add_column(head, justify="right")
    last = None
    for hour in hours:
        if last is not None and hour.hour != last:
            table.add_section()
        table.add_row(shown_hour(hour.hour) if hour.hour != last else "", *_cells(hour, covered[hour.hour]))
        last = hour.hour
    return table


def _cells(hour: TrafficHour, seconds: int) -> Iterator[str]:
    yield f"{hour.model} ({hour.base})" if hour.base else hour.model
    yield f"{hour.requests:,}"
    yield f"{hour.unanswered:,}"
    yield show_number(hour.asked / seconds)
    yield f"{show_number(hour.peak * MINUTES / HOUR)}/s"
    yield show_number(hour.burstiness)
    yield _tokens(hour.prompts, hour.prompt_tokens)
    yield _tokens(hour.outputs, hour.output_tokens)
    yield f"{hour.cached_tokens / max(1, hour.prompt_tokens):.0%}"


def _tokens(lengths: Mapping[int, int], total: int) -> str:
    found = rebuild(lengths, total)
    if not found:
        return "–"
    mean = total / sum(count for _, count in found)
    return f"{mean:,.0f}: {quantile(found, 0.5):,.0f} / {quantile(found, 0.95):,.0f}"


def shown_hour(hour: int) -> str:
    return datetime.fromtimestamp(hour, UTC).strftime("%Y-%m-%d %H:%M")


def read_hours(source: str, key_file: Path | None) -> list[TrafficHour]:
    """Returns the traffic that a server or a file has. `source` is `http…`, or the path of a file. Raises
    ConfigError, and CommandFailed if the server refuses or is not there."""
    if source.startswith(("http://", "https://")):
        try:
            return AdminClient(source, key_file).traffic()
        except GatewayError as error:
            raise CommandFailed(str(error)) from error
    try:
        found, damaged = decode_hours(Path(source).read_bytes())
    except OSError as error:
        raise ConfigError(
            f"--from-traffic: {source}: {error.strerror}; the URL of a server, or a file that its `traffic` "
            "names or `kvloom traffic --json` printed, is right"
        ) from error
    if damaged:
        if not found:
            raise ConfigError(
                f"--from-traffic: {source}: no line of a traffic log; what `kvloom traffic --json` prints is "
                "right"
            )
        print(f"kvloom: {source}: {show_count(damaged, 'damaged line')} left out", file=sys.stderr)
    return add_up(found)


def read_seen(hours: Sequence[TrafficHour], models: Sequence[str], at: At) -> SeenTraffic:
    """Returns the demand for models. Raises ConfigError if there is none."""
    try:
        return seen_traffic(hours, models, at, time.time())
    except ConfigError as error:
        raise ConfigError(f"--from-traffic: {error.message}") from error


def told(seen: SeenTraffic) -> Iterator[str]:
    """Says of which time the rates are, what is left out, and if there is too little of it."""
    if seen.hour is None:
        yield f"rates are means of {_span(seen.seconds)} of traffic"
    else:
        part = "" if seen.seconds == HOUR else f", of which the log has {_span(seen.seconds)}"
        yield f"rates are those of the busiest hour, from {shown_hour(seen.hour)} UTC{part}"
    if seen.others:
        yield f"traffic of models that are not planned for is left out: {', '.join(seen.others)}"
    if seen.is_scarce:
        yield f"warning: {scarcity(seen)}"


def scarcity(seen: SeenTraffic) -> str:
    """Returns what a log with too little traffic has, and how much is enough."""
    return (
        f"the log has {_span(seen.covered)}, {show_count(seen.asked, 'request')}: too little to size a fleet "
        f"by; {_span(LEAST_SECONDS)} and {show_count(LEAST_REQUESTS, 'request')}, or more, are right"
    )


def _span(seconds: int) -> str:
    """Returns the time in hours, or in whole minutes if it is shorter than one."""
    if seconds < HOUR:
        return show_count(-(-seconds // (HOUR // MINUTES)), "minute")
    return "1 hour" if seconds == HOUR else f"{show_number(seconds / HOUR)} hours"
