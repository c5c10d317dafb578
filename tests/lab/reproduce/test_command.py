"""`kvloom reproduce` as people type it."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import msgspec
import pytest

from kvloom.cli.__main__ import main
from kvloom.lab.reproduce import microserving
from kvloom.lab.reproduce.report import Experiment, Report, Scale, Tell

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reproduction.md"
BAD = [
    (["nobody"], ["PAPER", "aegaeon", "microserving", "muxserve", "weaver"]),
    (["microserving", "--figure", "14"], ["--figure '14'", "10, 11, 12, table-3, 13 are right"]),
    (
        ["muxserve", "--figure", "table-3"],
        [
            "--figure 'table-3'",
            "3, section-3.3, 5, section-4.2, 7, 7-replayed, 8, 9, 10, policies, overload are right",
        ],
    ),
    (["microserving", "--figure", "10", "--rate", "3"], ["--rate: microserving's 10", "none of this paper"]),
    (["llumnix", "--figure", "10", "--draws", "3"], ["--draws: llumnix's 10", "by --figure: 11"]),
    (["llumnix", "--figure", "11", "--traffic", "S-L"], ["--traffic 'S-L'", "prompt=X,output=Y are right"]),
    (["llumnix", "--figure", "11", "--traffic", "prompt=S,output=M"], ["no rates of S-M; --rate N"]),
    (["llumnix", "--figure", "11", "--rate", "-1"], ["--rate -1: more than 0"]),
    (["weaver", "--figure", "3"], ["--figure '3'", "table-1, 4, 5, 6, 7, auto are right"]),
    (["microserving", "--scale", "huge"], ["--scale", "small"]),
    (["microserving", "--json", "no/x.json"], ["no/x.json: no such folder"]),
    (["microserving", "--markdown", "no/x.md"], ["no/x.md: no such folder"]),
    (["microserving", "--html", "no/x.html"], ["no/x.html: no such folder"]),
]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("words", "said"), BAD)
def test_what_cannot_be_is_one_line(
    words: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["reproduce", *words])
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert shown.err.count("\n") == 1
    for part in said:
        assert part in shown.err


def test_one_figure_is_shown_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--figure", "table-3", "--figure", "table-3", "--scale", "small"]
    assert main(["reproduce", "microserving", *words, "--json", "out.json", "--markdown", "out.md"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for part in ("table 3: a layer's prefill", "0.197", "microserving: ", "1 holds"):
        assert part in shown.out
    assert "figure 1" not in shown.out
    (report,) = msgspec.json.decode(Path("out.json").read_bytes(), type=list[Report])
    assert [cell.paper for cell in report.cells][:2] == [1.247, 0.197]
    page = Path("out.md").read_text()
    assert page.count("## ") == 1
    assert all(f"| {cell.row} | {cell.column} | " in page for cell in report.cells)


def test_who_interrupts_is_told_that_nothing_was_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: Scale, tell: Tell) -> Report:
        tell("stopping", 0.5)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError

    monkeypatch.setattr(microserving, "EXPERIMENTS", (Experiment("1", run),))
    assert main(["reproduce", "microserving", "--json", "out.json"]) == 130
    assert capsys.readouterr().err == "kvloom: interrupted; nothing was written\n"
    assert not Path("out.json").exists()


def test_the_page_tells_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--help"]) == 0
    known = re.findall(r"^  (--[a-z]+)", capsys.readouterr().out, re.M)
    table = PAGE.read_text("utf-8").split("| option | |")[1].split("\n\n")[0]
    assert set(re.findall(r"(--[a-z]+)", table)) == set(known) != set()
