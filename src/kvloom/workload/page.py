"""Results as one HTML page: no scripts, nothing from outside, light or dark as its reader has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from kvloom.workload.axis import Axis
from kvloom.workload.page_style import COLOURS, STYLE
from kvloom.workload.results import CURVE, Latency, Results, Tally
from kvloom.workload.shown import show_number, show_seconds, show_upheaval
from kvloom.workload.svg import Curve, area_chart, line_chart

MOST_STRETCHES: Final = 48  # of a course, as it is drawn
OTHERS: Final = "others"
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
_KINDS: Final = (
    ("first", "Time to first token"),
    ("per_token", "Time per token"),
    ("end", "End to end"),
)


def page(results: Results) -> str:
    drawn = _drawn(results)
    parts = [
        _head(results),
        _tiles(results.total),
        _legend(drawn, len(results.models) > len(drawn)),
        '<div class="charts">',
        *(_distribution(results, drawn, kind, title) for kind, title in _KINDS),
        _tokens(results, drawn),
        _requests(results),
        "</div>",
        _table(results),
        _errors(results),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(results.title)}</title><style>{STYLE}</style></head>\n"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _drawn(results: Results) -> list[str]:
    """The models with a colour of their own: those that were asked most."""
    by_requests = sorted(results.models, key=lambda name: (-results.models[name].requests, name))
    return by_requests[:COLOURS] if len(by_requests) <= COLOURS else by_requests[: COLOURS - 1]


def _head(results: Results) -> str:
    total = results.total
    said = f"{results.source}: {total.requests:,} requests for {len(results.models)} models in "
    late = ""
    if results.lateness is not None:
        late = f" The client sent its requests {show_seconds(results.lateness.p99)} late (P99)."
    upheaval = ""
    if results.upheaval is not None:
        upheaval = f" On the way: {show_upheaval(results.upheaval)}."
    return f"<h1>{escape(results.title)}</h1><p>{said}{show_seconds(results.seconds)}.{late}{upheaval}</p>"


def _tiles(total: Tally) -> str:
    tiles = [
        ("requests/s", show_number(total.requests_per_second)),
        ("tokens/s", show_number(total.tokens_per_second)),
        ("errors", f"{total.errors:,}"),
        *((title.lower() + ", P50 / P99", _points(getattr(total, kind))) for kind, title in _KINDS),
        *((f"{name} of requests", f"{share:.1%}") for name, share in total.attained.items()),
    ]
    each = (f"<div><dd>{escape(value)}</dd><dt>{escape(name)}</dt></div>" for name, value in tiles)
    return f'<dl class="tiles">{"".join(each)}</dl>'


def _points(latency: Latency | None) -> str:
    return "–" if latency is None else f"{show_seconds(latency.p50)} / {show_seconds(latency.p99)}"


def _legend(drawn: Sequence[str], others: bool) -> str:
    names = [*drawn, *([OTHERS] if others else [])]
    each = (f'<li><i class="s{colour}"></i>{escape(name)}</li>' for colour, name in enumerate(names))
    return f'<ul class="legend">{"".join(each)}</ul>'


def _distribution(results: Results, drawn: Sequence[str], kind: str, title: str) -> str:
    found: list[tuple[int, str, Latency]] = []
    for colour, name in enumerate(drawn):
        latency: Latency | None = getattr(results.models[name], kind)
        if latency is not None:
            found.append((colour, name, latency))
    x = Axis.over([value for _, _, latency in found for value in latency.curve], show_seconds, log=True)
    y = Axis(0.0, 1.0, lambda share: f"{share:.0%}")
    curves = [
        Curve(name, colour, list(zip(latency.curve, CURVE, strict=True))) for colour, name, latency in found
    ]
    return _figure(title, line_chart(title, curves, x, y, "time, logarithmic", "requests"))


def _tokens(results: Results, drawn: Sequence[str]) -> str:
    """Tokens a second, the models upon each other."""
    rest = [name for name in results.models if name not in drawn]
    layers = [(name, colour, [results.courses[name].tokens]) for colour, name in enumerate(drawn)]
    if rest:
        layers.append((OTHERS, len(drawn), [results.courses[name].tokens for name in rest]))
    times, sums, width = _stretches(results, [courses for _, _, courses in layers])
    curves = [
        Curve(name, colour, [(at, value / width) for at, value in zip(times, values, strict=True)])
        for (name, colour, _), values in zip(layers, sums, strict=True)
    ]
    tops = [sum(column) / width for column in zip(*sums, strict=True)]
    x, y = Axis.over(times, show_seconds), Axis.over(tops, show_number)
    title = "Tokens a second"
    return _figure(title, area_chart(title, curves, x, y, "time", "tokens/s"))


def _requests(results: Results) -> str:
    """Requests a second that came and that were answered, of all models."""
    courses = list(results.courses.values())
    kinds = [[course.asked for course in courses], [course.answered for course in courses]]
    times, sums, width = _stretches(results, kinds)
    curves = [
        Curve(name, COLOURS + kind, [(at, value / width) for at, value in zip(times, values, strict=True)])
        for kind, (name, values) in enumerate(zip(("came", "answered"), sums, strict=True))
    ]
    x = Axis.over(times, show_seconds)
    y = Axis.over([value / width for values in sums for value in values], show_number)
    title = "Requests a second"
    legend = "".join(f'<li><i class="s{curve.colour}"></i>{curve.name}</li>' for curve in curves)
    chart = line_chart(title, curves, x, y, "time", "requests/s")
    return _figure(title, f'<ul class="legend">{legend}</ul>{chart}')


def _stretches(
    results: Results, layers: Sequence[Iterable[Sequence[float]]]
) -> tuple[list[float], list[list[float]], float]:
    """Middles of stretches, each layer's sums over them, and their width. Few enough to draw."""
    whole = [[sums for sums in layer if sums] for layer in layers]
    count = max((len(sums) for layer in whole for sums in layer), default=1)
    joined = -(-count // MOST_STRETCHES)
    width = results.width * joined
    bins = -(-count // joined)
    starts = range(0, bins * joined, joined)
    totals = [[sum(sum(sums[i : i + joined]) for sums in layer) for i in starts] for layer in whole]
    return [(i + 0.5) * width for i in range(bins)], totals, width


def _figure(title: str, chart: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>"


def _table(results: Results) -> str:
    heads = ["model", "requests", "errors", "req/s", "tok/s"]
    for _, title in _KINDS:
        heads += [f"{title} mean", "P50", "P80", "P95", "P99"]
    heads += list(results.total.attained)
    rows = list(results.models.items())
    if len(rows) > 1:
        rows.append(("all", results.total))
    body = "".join(_row(name, tally) for name, tally in rows)
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _row(name: str, tally: Tally) -> str:
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
    cells += [f"{share:.1%}" for share in tally.attained.values()]
    return f"<tr><th>{escape(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _errors(results: Results) -> str:
    if not results.errors:
        return ""
    found = sorted(results.errors.items(), key=lambda pair: -pair[1])
    rows = "".join(f"<tr><td>{count:,}</td><th>{escape(kind)}</th></tr>" for kind, count in found)
    return f'<h2>Errors</h2><div class="wide"><table><tbody>{rows}</tbody></table></div>'
