"""What docs/reproduction tells: its tables are its data files, and the present code still gives them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec import structs
from tools.evidence import (
    DATA,
    Evidence,
    changed,
    data_file,
    differences,
    experiments,
    main,
    page_text,
    pages,
    read_evidence,
)

from kvloom.lab.reproduce.published import FOLDER
from kvloom.lab.reproduce.report import Cell, Claim, Experiment, Report

KNOWN = {(paper, experiment.name): experiment for paper, experiment in experiments()}
REPORT = Report(
    name="figure 1",
    title="times",
    cells=(Cell(row="a", column="ms", paper=2.0, ours=1000.0),),
    claims=(Claim(said="it is quick", holds=True, found="3.00 s of 12"),),
)


def evidence_of(paper: str, name: str) -> Evidence:
    evidence = read_evidence(data_file(paper, name))
    assert evidence is not None, f"python -m tools.evidence {paper} --figure {name}"
    return evidence


@pytest.mark.parametrize(("paper", "name"), KNOWN)
def test_a_figure_played_small_gives_what_it_gave_when_it_was_made(
    paper: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    experiment: Experiment = KNOWN[paper, name]
    now, then = experiment.run("small", lambda *_: None), evidence_of(paper, name).small
    assert differences(experiment, then, now) == [], f"make evidence ARGS='{paper} --figure {name}'"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_page_is_what_the_data_files_say(page: Path) -> None:
    text = page.read_text("utf-8")
    assert page_text(text) == text, "make evidence ARGS=--page"


def test_every_data_file_is_a_figure_of_a_page() -> None:
    marks = re.findall(r"<!-- (\w+) ([\w.-]+) -->", "".join(page.read_text("utf-8") for page in pages()))
    shown = sorted(f"{paper}/{name}.json" for paper, name in marks)
    assert sorted(str(path.relative_to(DATA)) for path in DATA.glob("*/*.json")) == shown
    assert sorted(str(data_file(*one).relative_to(DATA)) for one in KNOWN) == shown


@pytest.mark.parametrize(
    ("now", "lines"),
    [
        (REPORT, 0),
        (structs.replace(REPORT, cells=(Cell(row="a", column="ms", paper=2.0, ours=1009.0),)), 0),
        (structs.replace(REPORT, cells=(Cell(row="a", column="ms", paper=2.0, ours=1020.0),)), 1),
        (structs.replace(REPORT, cells=()), 6),  # each line that is no longer there, or elsewhere
        (structs.replace(REPORT, claims=(Claim(said="it is quick", holds=False, found="3.00 s of 12"),)), 1),
        (structs.replace(REPORT, claims=(Claim(said="it is quick", holds=True, found="3.10 s of 12"),)), 1),
    ],
)
def test_what_changed_is_told(now: Report, lines: int) -> None:
    assert len(changed(REPORT, now)) == lines


def test_a_figure_without_data_is_named() -> None:
    with pytest.raises(ValueError, match="weaver figure-99, which has no data file"):
        page_text("<!-- weaver figure-99 -->\n<!-- end -->\n")


def test_a_figure_that_nobody_knows_is_one_line() -> None:
    assert main(["llumnix", "--figure", "99"]) == (
        "no figure 99 of llumnix: `kvloom reproduce PAPER --figure ?` tells which there are"
    )
