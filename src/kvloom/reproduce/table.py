"""Reports as tables, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvloom.reproduce.report import Cell, Claim, Grid, Report

_STYLES: Final = {"agrees": "green", "holds": "green", "near": "yellow", "differs": "red", "fails": "red"}
_CELL_HEADS: Final = ("", "", "paper", "ours", "ratio", "verdict")
_CLAIM_HEADS: Final = ("the paper says", "found here", "verdict")


def show_report(report: Report) -> Group:
    """For a terminal."""
    title = f"{report.name}: {report.title}"
    parts: list[Table | Text] = [Text(""), Text(title, style="bold")]
    if report.cells:
        parts.append(_table(_CELL_HEADS, map(_cell, report.cells), right=range(2, 5)))
    if report.claims:
        parts.append(_table(_CLAIM_HEADS, map(_claim, report.claims)))
    for grid in report.grids:
        parts += [Text(grid.title), _table(grid.heads, grid.rows, right=_numbers(grid))]
    return Group(*parts)


def markdown(report: Report) -> str:
    """For a page."""
    parts = [f"### {report.name[0].upper()}{report.name[1:]}: {report.title}"]
    if report.cells:
        parts.append(_lines(_CELL_HEADS, map(_cell, report.cells), right=range(2, 5)))
    if report.claims:
        parts.append(_lines(_CLAIM_HEADS, map(_claim, report.claims)))
    for grid in report.grids:
        parts += [f"{grid.title}:", _lines(grid.heads, grid.rows, right=_numbers(grid))]
    return "\n\n".join(parts) + "\n"


def verdicts(reports: Iterable[Report]) -> dict[str, int]:
    """How often each was found."""
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


def _claim(claim: Claim) -> tuple[str, ...]:
    return claim.said, claim.found, claim.verdict


def _numbers(grid: Grid) -> list[int]:
    """Columns of numbers, beside the first one."""
    return [i for i in range(1, len(grid.heads)) if all(row[i][:1].isdigit() for row in grid.rows)]


def _number(value: float) -> str:
    """Three digits, or all that stand before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _table(heads: Sequence[str], rows: Iterable[tuple[str, ...]], right: Sequence[int] = ()) -> Table:
    table = Table()
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i in right else "left")
    for row in rows:
        table.add_row(*(Text(text, style=_STYLES.get(text, "")) for text in row))
    return table


def _lines(heads: Sequence[str], rows: Iterable[tuple[str, ...]], right: Sequence[int] = ()) -> str:
    def lines() -> Iterator[str]:
        yield _line(heads)
        yield _line(["---:" if i in right else "---" for i in range(len(heads))])
        yield from map(_line, rows)

    return "\n".join(lines())


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
