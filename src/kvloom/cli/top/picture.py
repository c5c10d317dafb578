"""Draws a fleet as lines of a terminal, of any width from 60 columns on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from kvloom.cli.app import printable
from kvloom.cli.top.watched import Happening, Pace, Watched
from kvloom.journal.samples import Sample, UnitModel, UnitSample
from kvloom.types.numbers import show_number, show_seconds, show_size

LEAST_WIDTH: Final = 60
LEAST_EVENTS: Final = 3
MOST_EVENTS: Final = 20
_MODEL: Final = ("blue", "dark_orange", "green", "magenta", "yellow", "cyan", "red")
_STATES: Final = {"up": "green", "down": "bold red"}
_SIGNS: Final = {
    "used": "█",
    "cached": "▓",
    "pinned": "▒",
    "weights": "▪",
    "free": "·",
}


class Column(NamedTuple):
    """A column of a table. `from_width` is the terminal's width from which on it is there."""

    head: str
    width: int
    right: bool = True
    from_width: int = 0


_POOL: Final = (
    Column("model", 14, right=False),
    Column("pool", 20, right=False),
    Column("of it", 5),
    Column("quota", 5, from_width=80),
    Column("running", 7),
    Column("waiting", 7, right=False),
    Column("preempted", 9, from_width=100),
    Column("weights", 7, right=False, from_width=100),
)
_PACES: Final = (
    Column("model", 14, right=False),
    Column("tokens/s", 8),
    Column("TTFT", 7),
    Column("per token", 9),
    Column("hits", 5),
    Column("req/s", 6),
)


def draw(fleet: Watched, width: int, height: int | None = None) -> Text:
    """Returns the picture. `height` is the number of lines that there are; None for as many as are needed."""
    width = max(width, LEAST_WIDTH)
    above: list[Text | str] = [*_head(fleet, width)]
    if (sample := fleet.last) is not None:
        colours = {name: _MODEL[i % len(_MODEL)] for i, name in enumerate(_models(sample))}
        for unit in sample.units:
            above += _unit(unit, colours, width)
        above += ["", *_paces(fleet.paces(), colours, width)]
    room = MOST_EVENTS if height is None else max(height - len(above) - 2, LEAST_EVENTS)
    events = [_event(one, width) for one in list(fleet.happenings)[-min(room, MOST_EVENTS) :]]
    if height is not None:
        above = above[: max(height - len(events) - 2, 1)]
    below: list[Text | str] = ["", Text("events", "bold"), *events] if events else []
    return Text("\n").join(line if isinstance(line, Text) else Text(line) for line in above + below)


def _models(sample: Sample) -> list[str]:
    return sorted({one.model for unit in sample.units for one in unit.models})


def _count(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}" + ("" if len(things) == 1 else "s")


def _head(fleet: Watched, width: int) -> Iterator[Text]:
    sample = fleet.last
    if sample is None:
        yield _cut(Text(f"kvloom at {printable(fleet.url)}", "bold"), width)
    else:
        tokens = sum(pace.tokens or 0.0 for pace in fleet.paces().values())
        counts = f"{_count(sample.units, 'unit')}, {_count(_models(sample), 'model')}"
        counted = f"{counts}, {show_number(tokens)} tokens/s"
        moment = time.strftime("%H:%M:%S", time.localtime(sample.at))
        yield _cut(Text(f"kvloom  {moment}  {counted}  {printable(fleet.url)}", "bold"), width)
    if fleet.problem:
        yield _cut(Text(printable(fleet.problem), "bold red"), width)


def _unit(unit: UnitSample, colours: dict[str, str], width: int) -> Iterator[Text | str]:
    yield ""
    line = Text(printable(unit.unit), "bold")
    line.append(f"  {printable(unit.state)}", _STATES.get(unit.state, "yellow"))
    if unit.node:
        line.append(f"  {printable(unit.node)}")
    if unit.blocks:
        size = show_size(unit.blocks * unit.block_bytes)
        line.append(f"  {size}, {_share(unit.free, unit.blocks)} free")
    if unit.lent:
        line.append(f", {_share(unit.lent, unit.blocks)} lent")
    for wave in unit.waves or ():
        line.append(f"  {printable(wave.peer) or 'a peer'} waits {show_seconds(wave.wait_seconds)} a task")
    yield _cut(line, width)
    if unit.models:
        yield from _table(
            _POOL,
            width,
            "pool",
            [_pool_row(one, unit, colours[one.model]) for one in unit.models],
        )


Cell = str | Text | Callable[[int], Text]


def _pool_row(one: UnitModel, unit: UnitSample, colour: str) -> dict[str, Cell]:
    held = one.used + one.cached + one.pinned + one.weights
    waits = f"{one.waiting:,}" + (f" {_age(one.oldest)}" if one.waiting else "")
    return {
        "model": Text(printable(one.model), colour),
        "pool": lambda size: _bar(one, unit.blocks, size, colour),
        "of it": _share(held, unit.blocks),
        "quota": _share(one.quota, unit.blocks),
        "running": f"{one.running:,}",
        "waiting": Text(waits, "yellow" if one.waiting else ""),
        "preempted": f"{one.preemptions:,}",
        "weights": "awake" if one.awake else "asleep",
    }


def _bar(one: UnitModel, blocks: int, size: int, colour: str) -> Text:
    """Returns the blocks of a model as a part of the pool, and what is left of its quota as points."""
    bar, begun, drawn = Text(), 0, 0
    for kind in ("used", "cached", "pinned", "weights"):
        begun += getattr(one, kind)
        end = min(round(size * begun / blocks), size) if blocks else 0
        bar.append(_SIGNS[kind] * (end - drawn), colour)
        drawn = end
    quota = min(round(size * one.quota / blocks), size) if blocks else 0
    bar.append(_SIGNS["free"] * max(quota - drawn, 0), "dim")
    return bar


def _paces(paces: dict[str, Pace], colours: dict[str, str], width: int) -> Iterator[Text | str]:
    rows: list[dict[str, Cell]] = [
        {
            "model": Text(printable(name), colours.get(name, "")),
            "tokens/s": _number(pace.tokens),
            "TTFT": _seconds(pace.first),
            "per token": _seconds(pace.per_token),
            "hits": "–" if pace.hits is None else f"{pace.hits:.0%}",
            "req/s": _number(pace.requests),
        }
        for name, pace in paces.items()
    ]
    yield from _table(_PACES, width, "model", rows)


def _table(
    columns: Sequence[Column], width: int, widest: str, rows: Sequence[dict[str, Cell]]
) -> Iterator[Text]:
    """Yields a line for the heads and each row. `widest` is the column that takes what is left over."""
    shown = [column for column in columns if width >= column.from_width]
    left = width - sum(column.width for column in shown) - 2 * (len(shown) - 1)
    names = min(max(left, 0) // 3, 26) if widest != "model" else 0
    sizes = {column.head: column.width for column in shown}
    sizes["model"] += names
    sizes[widest] += min(left, 60) if widest == "model" else left - names
    heads: dict[str, Cell] = {column.head: Text(column.head, "dim") for column in shown}
    for row in [heads, *rows]:
        line = Text()
        for column in shown:
            size = sizes[column.head]
            cell = row[column.head]
            text = cell(size) if callable(cell) else Text(cell) if isinstance(cell, str) else cell
            line.append("  " if line.plain else "")
            line.append_text(_fit(text, size, right=column.right))
        line.rstrip()
        yield line


def _fit(text: Text, size: int, *, right: bool) -> Text:
    """Returns the text, cut or filled up to exactly so many columns."""
    if (told := cell_len(text.plain)) > size:
        text = text.copy()
        text.truncate(size, overflow="ellipsis")
        told = cell_len(text.plain)
    room = " " * (size - told)
    return Text(room).append_text(text) if right else text.copy().append(room)


def _event(one: Happening, width: int) -> Text:
    """Returns a line on what has happened, where, to whom, and why."""
    event = one.event
    who = " ".join(filter(None, (event.model, event.name, event.request[:20])))
    way = f" {event.source} to {event.destination}" if event.destination else ""
    line = Text(time.strftime("%H:%M:%S ", time.localtime(one.at)), "dim")
    line.append(set_cell_size(printable(event.type), 11) + " ", "bold")
    said = f"{one.component}: {who}{way}" if who or way else one.component
    line.append(printable(said))
    line.append(f"; {printable(event.reason)}" if event.reason else "", "dim")
    return _cut(line, width)


def _cut(line: Text, width: int) -> Text:
    if cell_len(line.plain) > width:
        line.truncate(width, overflow="ellipsis")
    return line


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "–"


def _number(value: float | None) -> str:
    return "–" if value is None else show_number(round(value, 1))


def _seconds(value: float | None) -> str:
    return "–" if value is None else show_seconds(value)


def _age(seconds: float) -> str:
    return f"{seconds:.1f}s" if seconds < 10 else f"{min(seconds, 99999):.0f}s"
