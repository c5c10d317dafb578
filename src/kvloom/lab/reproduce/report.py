"""Findings of a paper's experiment beside those found here, and the tables that show both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Final, Literal, NamedTuple

from msgspec import Struct
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvloom.lab.reproduce.kept_runs import KeptRuns
from kvloom.page import report as page
from kvloom.page.report import Card, Pair

Scale = Literal["small", "full"]
Tell = Callable[[str, float], None]  # what is done now, and the part of the experiment done already

AGREES: Final = 0.10  # by which the larger of two numbers may exceed the smaller
NEAR: Final = 0.25


def part_of(tell: Tell, at: int, of: int) -> Tell:
    """Returns a `Tell` for the `at`-th of so many parts, counted from 0."""
    return lambda what, part: tell(what, (at + part) / of)


class Cell(Struct, frozen=True, kw_only=True):
    """One number, and its row and column. `paper` is None if the paper tells none."""

    row: str
    column: str
    paper: float | None
    ours: float

    @property
    def ratio(self) -> float | None:
        """Returns our number over the paper's."""
        return self.ours / self.paper if self.paper else None

    @property
    def verdict(self) -> str:
        ratio = self.ratio
        if ratio is None:
            return ""
        off = (max(ratio, 1 / ratio) if ratio > 0 else float("inf")) - 1
        return "agrees" if off <= AGREES else "near" if off <= NEAR else "differs"


def cells(row: str, *told: tuple[str, float | None, float]) -> list[Cell]:
    """Returns the cells of a row: for each its column, the paper's number and ours."""
    return [Cell(row=row, column=column, paper=paper, ours=ours) for column, paper, ours in told]


class Claim(Struct, frozen=True, kw_only=True):
    """A statement of the paper about its figure, and what is found here, in a few words. `holds` is None if
    what was found cannot tell."""

    said: str
    holds: bool | None
    found: str

    @property
    def verdict(self) -> str:
        return "cannot tell" if self.holds is None else "holds" if self.holds else "fails"


def duration(seconds: float) -> str:
    """Returns `2.50 s`, or `250 ms` if that is less than a second."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


class Grid(Struct, frozen=True, kw_only=True):
    """Numbers of ours that the paper draws and does not tell, as text, with a line for each row."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Report(Struct, frozen=True, kw_only=True):
    """One figure or table with all that is said of it. Its name is, for example, `figure 10`."""

    name: str
    title: str
    cells: tuple[Cell, ...] = ()
    claims: tuple[Claim, ...] = ()
    grids: tuple[Grid, ...] = ()


@dataclass(frozen=True, slots=True)
class Options:
    """The options of an experiment that a reader asks for besides its scale. None, or an empty one, stands
    for the experiment's own."""

    traffic: str | None = None
    rates: tuple[float, ...] = ()
    draws: int | None = None
    requests: int | None = None
    thresholds: tuple[float, ...] = ()
    kept: KeptRuns | None = None
    """Where the runs that are over are kept. It changes nothing that is found, and is not `given`."""

    @property
    def given(self) -> tuple[str, ...]:
        """Returns the names of the options that are given."""
        return tuple(one.name for one in fields(self) if one.name != "kept" and getattr(self, one.name))


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment. `name` is that of its figure (`10`) or table (`table-3`). `run` raises ConfigError."""

    name: str
    run: Callable[[Scale, Tell], Report]
    adjusted: Callable[[Scale, Tell, Options], Report] | None = None
    """The function that runs it with what a reader asks besides; None if it has no options. It raises
    ConfigError."""
    options: tuple[str, ...] = ()
    """The names of the options that it has, as `Options` has them."""
    published: str = ""
    """The name of the file that has the paper's numbers, in the folder of `published.FOLDER`; empty if they
    are a part of kvloom."""
    timed: bool = False
    """Tells whether it shows times of the machine that plays it, so that no two runs agree in their
    numbers."""

    def play(self, scale: Scale, tell: Tell, options: Options) -> Report:
        """Runs it with the options, which it has if any are given. Raises ConfigError."""
        if options != Options() and self.adjusted is not None:
            return self.adjusted(scale, tell, options)
        return self.run(scale, tell)


_STYLES: Final = {
    **dict.fromkeys(("agrees", "holds"), "green"),
    **dict.fromkeys(("near", "cannot tell"), "yellow"),
    **dict.fromkeys(("differs", "fails"), "red"),
}
_CELL_HEADS: Final = ("", "", "paper", "ours", "ratio", "verdict")
_CLAIM_HEADS: Final = ("the paper says", "found here", "verdict")


class _Tabular(NamedTuple):
    """A table of a report, whichever way it is shown. `right` are the columns of numbers."""

    title: str
    heads: Sequence[str]
    rows: Sequence[tuple[str, ...]]
    right: Sequence[int] = ()


def _tables(report: Report) -> Iterator[_Tabular]:
    if report.cells:
        yield _Tabular("", _CELL_HEADS, [_cell(cell) for cell in report.cells], range(2, 5))
    if report.claims:
        claims = [(claim.said, claim.found, claim.verdict) for claim in report.claims]
        yield _Tabular("", _CLAIM_HEADS, claims)
    for grid in report.grids:
        yield _Tabular(grid.title, grid.heads, grid.rows, _numbers(grid))


def show_report(report: Report) -> Group:
    """Returns the report for a terminal."""
    parts: list[Table | Text] = [Text(""), Text(f"{report.name}: {report.title}", style="bold")]
    for one in _tables(report):
        if one.title:
            parts.append(Text(one.title))
        table = Table()
        for i, head in enumerate(one.heads):
            table.add_column(head, justify="right" if i in one.right else "left")
        for row in one.rows:
            table.add_row(*(Text(text, style=_STYLES.get(text, "")) for text in row))
        parts.append(table)
    return Group(*parts)


def markdown(report: Report) -> str:
    """Returns the report for a page."""
    parts = [f"## {report.name[0].upper()}{report.name[1:]}: {report.title}"]
    for one in _tables(report):
        if one.title:
            parts.append(f"{one.title}:")
        rule = ["---:" if i in one.right else "---" for i in range(len(one.heads))]
        parts.append("\n".join("| " + " | ".join(row) + " |" for row in (one.heads, rule, *one.rows)))
    return "\n\n".join(parts) + "\n"


def drawn(report: Report) -> Card:
    """Returns the report for a page to look at: each number of the paper above ours, on a scale for each
    column."""
    most: dict[str, float] = {}
    for cell in report.cells:
        most[cell.column] = max(most.get(cell.column, 0.0), cell.ours, cell.paper or 0.0)
    pairs = [
        Pair(
            name=" · ".join(filter(None, (cell.row, cell.column))),
            theirs=cell.paper,
            ours=cell.ours,
            told=_beside(cell),
            whole=most[cell.column],
        )
        for cell in report.cells
    ]
    tables = [
        page.Grid(one.heads, one.rows, one.right) for one in _tables(report) if one.heads != _CELL_HEADS
    ]
    return Card(f"{report.name}: {report.title}", "", [*([pairs] if pairs else []), *tables])


def _beside(cell: Cell) -> str:
    if cell.paper is None:
        return _number(cell.ours)
    return f"{_number(cell.paper)} told, {_number(cell.ours)} found: {cell.verdict}"


def verdicts(reports: Iterable[Report]) -> dict[str, int]:
    """Returns how often each verdict was found."""
    found = dict.fromkeys(_STYLES, 0)
    for report in reports:
        told = [*(cell.verdict for cell in report.cells), *(claim.verdict for claim in report.claims)]
        for verdict in filter(None, told):
            found[verdict] += 1
    return found


def _cell(cell: Cell) -> tuple[str, ...]:
    paper, ratio = cell.paper, cell.ratio
    return (
        cell.row,
        cell.column,
        "–" if paper is None else _number(paper),
        _number(cell.ours),
        "–" if ratio is None else f"{ratio:.2f}",
        cell.verdict,
    )


def _numbers(grid: Grid) -> list[int]:
    """Returns the columns of numbers, beside the first one."""
    return [i for i in range(1, len(grid.heads)) if all(row[i][:1].isdigit() for row in grid.rows)]


def _number(value: float) -> str:
    """Returns three digits, or all that stand before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
