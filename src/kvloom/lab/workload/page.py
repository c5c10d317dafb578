"""Results as one HTML page that loads nothing from elsewhere, light or dark as its reader has it.

The charts are drawn by uPlot, which lies in `page/uplot/` with its licence, and is written into the page.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from kvloom.lab.workload.results import CURVE, Course, Latency, Results, Tally, show_fleet_events
from kvloom.page import uplot
from kvloom.page.report import style
from kvloom.types.numbers import show_number, show_seconds

MOST_STRETCHES: Final = 64  # of a course, as it is drawn
OTHERS: Final = "others"
STATIC: Final = Path(__file__).with_name("static")
COLOURS: Final = (  # light and dark; they differ in lightness too
    ("#1f5fbf", "#74a9f7"),
    ("#c2560a", "#f59b58"),
    ("#0b7a55", "#4cc79c"),
    ("#9c3f94", "#dd8fd4"),
    ("#7a6200", "#d6ba45"),
    ("#1988a8", "#6cc9e6"),
    ("#b02a44", "#f5808f"),
    ("#6b6b76", "#a5a5b2"),
)
_DASHES: Final[tuple[tuple[int, int] | None, ...]] = (*(None,) * 4, *((6, 3),) * 3, (2, 3))
_KINDS: Final = (
    ("first", "Time to first token"),
    ("per_token", "Time per token"),
    ("end", "End to end"),
)
_SUMS: Final = ("asked", "answered", "tokens")
_LEAST: Final = 1e-9  # seconds; a logarithmic axis has no 0

Unit = Literal["seconds", "number", "share"]


@dataclass(frozen=True, slots=True)
class Side:
    """An axis."""

    unit: Unit
    label: str
    name: str
    """The name of its values in the legend."""
    range: tuple[float, float]
    log: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a chart."""

    name: str
    colour: int
    values: Sequence[float | None]
    """The series' values, one for each of the chart's places; None if the series has no point there."""
    dash: tuple[int, int] | None = None
    own: Sequence[float] | None = None
    """The values without those that they are stacked upon; None if nothing is stacked."""


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x: Side
    y: Side
    places: Sequence[float]
    """The x of the values, ascending."""
    series: Sequence[Line] = field(default_factory=list)
    filled: bool = False


def page(results: Results) -> str:
    """Returns the page's text."""
    drawn = _drawn(results)
    scripts = [uplot("uPlot.iife.min.js"), _static("page.js")]
    tables = list(results.models.items())
    if len(tables) > 1:
        tables.append(("all", results.total))
    return _template().render(
        results=results,
        said=_said(results),
        tiles=_tiles(results.total),
        charts=[asdict(chart) for chart in charts(results, drawn)],
        heads=_heads(results),
        rows=[(name, _cells(tally)) for name, tally in tables],
        errors=sorted(results.errors.items(), key=lambda pair: -pair[1]),
        colours=COLOURS,
        style=style(),
        chart_style=uplot("uPlot.min.css"),
        scripts=scripts,
        allowed=[_allowed(script) for script in scripts],
    )


@cache
def _static(name: str) -> str:
    return (STATIC / name).read_text("utf-8").strip()


def _template() -> Template:
    loader = FileSystemLoader(STATIC)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("page.html")


def _allowed(script: str) -> str:
    """Returns the source expression by which the page's policy lets this script run, and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _drawn(results: Results) -> list[str]:
    """Returns the models with a colour of their own: those that were asked most."""
    by_requests = sorted(results.models, key=lambda name: (-results.models[name].requests, name))
    return (
        by_requests[: len(COLOURS)] if len(by_requests) <= len(COLOURS) else by_requests[: len(COLOURS) - 1]
    )


def charts(results: Results, drawn: Sequence[str]) -> list[Chart]:
    return [
        *(_distribution(results, drawn, kind, title) for kind, title in _KINDS),
        _tokens(results, drawn),
        _requests(results),
    ]


def _distribution(results: Results, drawn: Sequence[str], kind: str, title: str) -> Chart:
    """Returns the share of the requests that took at most a time, by model."""
    curves: list[tuple[int, str, dict[float, float]]] = []
    for colour, name in enumerate(drawn):
        latency: Latency | None = getattr(results.models[name], kind)
        if latency is not None:
            steps = zip(latency.curve, CURVE, strict=True)
            curves.append((colour, name, {max(seconds, _LEAST): share for seconds, share in steps}))
    places = sorted({seconds for _, _, curve in curves for seconds in curve})
    low, high = (places[0], places[-1]) if places else (0.01, 0.1)
    return Chart(
        title,
        Side("seconds", "time, logarithmic", "time", (0.9 * low, 1.1 * high), log=True),
        Side("share", "requests", "", (0.0, 1.0)),
        places,
        [
            Line(name, colour, [curve.get(place) for place in places], _DASHES[colour])
            for colour, name, curve in curves
        ],
    )


def _tokens(results: Results, drawn: Sequence[str]) -> Chart:
    """Returns tokens a second, the models stacked. A layer is drawn over those that reach higher."""
    layers = [(name, [results.courses[name]]) for name in drawn]
    rest = [course for name, course in results.courses.items() if name not in drawn]
    if rest:
        layers.append((OTHERS, rest))
    places = _places(results)
    height = [0.0] * len(places)
    series = []
    for colour, (name, courses) in enumerate(layers):
        own = _paces(results, courses, "tokens")
        height = [below + value for below, value in zip(height, own, strict=True)]
        series.append(Line(name, colour, height, own=own))
    return Chart(
        "Tokens a second", _time(places), _pace("tokens/s", height), places, series[::-1], filled=True
    )


def _requests(results: Results) -> Chart:
    """Returns requests a second that came and that were answered, of all models."""
    courses, places = list(results.courses.values()), _places(results)
    came, answered = (_paces(results, courses, kind) for kind in ("asked", "answered"))
    return Chart(
        "Requests a second",
        _time(places),
        _pace("requests/s", [*came, *answered]),
        places,
        [Line("came", len(COLOURS) - 1, came), Line("answered", 0, answered)],
    )


def _stretches(results: Results) -> tuple[int, int]:
    """Returns how many stretches of the courses are joined to one, and how many there are then."""
    sums = (_sums(course, kind) for course in results.courses.values() for kind in _SUMS)
    count = max(map(len, sums), default=0)
    joined = max(1, -(-count // MOST_STRETCHES))
    return joined, -(-count // joined)


def _places(results: Results) -> list[float]:
    """Returns the middles of the stretches, in seconds."""
    joined, count = _stretches(results)
    return [(i + 0.5) * joined * results.width for i in range(count)]


def _sums(course: Course, kind: str) -> list[float]:
    sums: list[float] = getattr(course, kind)
    return sums


def _paces(results: Results, courses: Sequence[Course], kind: str) -> list[float]:
    """Returns the courses' sum a second in each stretch."""
    joined, count = _stretches(results)
    found = [0.0] * count
    for course in courses:
        for i, amount in enumerate(_sums(course, kind)):
            found[i // joined] += amount / (joined * results.width)
    return found


def _time(places: Sequence[float]) -> Side:
    return Side("seconds", "time", "time", (0.0, 1.02 * max(places, default=1.0)))


def _pace(label: str, values: Sequence[float]) -> Side:
    return Side("number", label, "", (0.0, 1.04 * max(values, default=1.0) or 1.0))


def _said(results: Results) -> str:
    models, seconds = len(results.models), show_seconds(results.seconds)
    parts = [f"{results.source}: {results.total.requests:,} requests for {models} models in {seconds}."]
    if results.lateness is not None:
        parts.append(f"The client sent its requests {show_seconds(results.lateness.p99)} late (P99).")
    if results.client_cores is not None:
        parts.append(f"It used {results.client_cores:.2f} cores.")
    if results.fleet_events is not None:
        parts.append(f"On the way: {show_fleet_events(results.fleet_events)}.")
    return " ".join(parts)


def _tiles(total: Tally) -> list[tuple[str, str]]:
    return [
        ("requests/s", show_number(total.requests_per_second)),
        ("tokens/s", show_number(total.tokens_per_second)),
        ("errors", f"{total.errors:,}"),
        *((title.lower() + ", P50 / P99", _points(getattr(total, kind))) for kind, title in _KINDS),
        *((f"{name} of requests", f"{share:.1%}") for name, share in total.attained.items()),
    ]


def _points(latency: Latency | None) -> str:
    return "–" if latency is None else f"{show_seconds(latency.p50)} / {show_seconds(latency.p99)}"


def _heads(results: Results) -> list[str]:
    heads = ["model", "requests", "errors", "req/s", "tok/s"]
    for _, title in _KINDS:
        heads += [f"{title} mean", "P50", "P80", "P95", "P99"]
    return heads + list(results.total.attained)


def _cells(tally: Tally) -> list[str]:
    cells = [
        f"{tally.requests:,}",
        f"{tally.errors:,}",
        show_number(tally.requests_per_second),
        show_number(tally.tokens_per_second),
    ]
    for kind, _ in _KINDS:
        latency: Latency | None = getattr(tally, kind)
        if latency is None:
            cells += ["–"] * 5
        else:
            values = (latency.mean, latency.p50, latency.p80, latency.p95, latency.p99)
            cells += [show_seconds(value) for value in values]
    return cells + [f"{share:.1%}" for share in tally.attained.values()]
