"""Cells and their verdicts, and the tables they are shown in."""

from __future__ import annotations

import pytest
from rich.console import Console

from kvloom.lab.reproduce.report import Cell, Claim, Grid, Report, drawn, markdown, show_report, verdicts
from kvloom.page.report import report_page

REPORT = Report(
    name="figure 9",
    title="hens",
    cells=(
        Cell(row="eggs", column="a day", paper=2.0, ours=2.1),
        Cell(row="feathers", column="a day", paper=None, ours=1234.5),
    ),
    claims=(
        Claim(said="hens lay", holds=True, found="they do"),
        Claim(said="hens fly", holds=False, found="hardly"),
    ),
    grids=(
        Grid(title="ours", heads=("hen", "where", "eggs"), rows=(("Ada", "1st", "7"), ("Bea", "barn", "5"))),
    ),
)


@pytest.mark.parametrize(
    ("paper", "ours", "ratio", "verdict"),
    [
        (100.0, 109.0, 1.09, "agrees"),
        (109.0, 100.0, 100 / 109, "agrees"),
        (100.0, 111.0, 1.11, "near"),
        (124.0, 100.0, 100 / 124, "near"),
        (100.0, 126.0, 1.26, "differs"),
        (126.0, 100.0, 100 / 126, "differs"),
        (100.0, 0.0, 0.0, "differs"),
        (100.0, -100.0, -1.0, "differs"),
        (None, 5.0, None, ""),
    ],
)
def test_a_verdict_is_the_same_from_both_sides(
    paper: float | None, ours: float, ratio: float | None, verdict: str
) -> None:
    cell = Cell(row="", column="", paper=paper, ours=ours)
    assert (cell.ratio, cell.verdict) == (ratio, verdict)


def test_verdicts_are_counted() -> None:
    counts = verdicts([REPORT, REPORT])
    assert counts == {"agrees": 2, "holds": 2, "near": 0, "cannot tell": 0, "differs": 0, "fails": 2}


def test_a_drawing_has_the_papers_numbers_above_ours_and_all_other_tables() -> None:
    text = report_page("hens", "", [drawn(REPORT)])
    assert "2 told, 2.1 found: agrees" in text
    assert '<rect class="theirs" width="1.6" height="12"/>' in text  # 2 of 1234.5, the most of its column
    assert text.count('class="theirs"') == 1
    assert text.count('class="ours"') == 2
    for part in ("figure 9: hens", "<td>hens fly</td><td>hardly</td><td>fails</td>", "<td>Ada</td>"):
        assert part in text


def test_a_page_has_all_tables() -> None:
    assert markdown(REPORT) == (
        "## Figure 9: hens\n\n"
        "|  |  | paper | ours | ratio | verdict |\n"
        "| --- | --- | ---: | ---: | ---: | --- |\n"
        "| eggs | a day | 2 | 2.1 | 1.05 | agrees |\n"
        "| feathers | a day | – | 1,234 | – |  |\n\n"
        "| the paper says | found here | verdict |\n"
        "| --- | --- | --- |\n"
        "| hens lay | they do | holds |\n"
        "| hens fly | hardly | fails |\n\n"
        "ours:\n\n"
        "| hen | where | eggs |\n"
        "| --- | --- | ---: |\n"
        "| Ada | 1st | 7 |\n"
        "| Bea | barn | 5 |\n"
    )


def test_a_terminal_shows_the_same_words() -> None:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(show_report(REPORT))
    shown = capture.get()
    for words in ("figure 9: hens", "feathers", "1,234", "1.05", "hens fly", "hardly", "fails", "Ada"):
        assert words in shown
