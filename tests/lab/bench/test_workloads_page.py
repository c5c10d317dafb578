"""docs/workloads.md: its commands print what it shows, and its tables are the code's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from pydantic import BaseModel

from kvloom.cli.__main__ import main
from kvloom.lab.workload.lengths import STAND_INS
from kvloom.lab.workload.make import open_workload
from kvloom.lab.workload.request import LOWEST
from kvloom.lab.workload.spec import (
    Conversations,
    Drift,
    Lengths,
    ModelSpec,
    ReplaySpec,
    SystemPrompts,
    WorkloadSpec,
)
from kvloom.lab.workload.traces import read_workload

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "workloads.md").read_text("utf-8")
SPECS = re.findall(r"^```yaml\n# (\S+)\n(.*?)^```", PAGE, re.M | re.S)
COMMANDS = re.findall(r"^```sh\n(.*?)^```\n\n```\n(.*?)^```", PAGE, re.M | re.S)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in SPECS:
        (tmp_path / name).write_text(text)
    rows = "".join(f"2023-11-16 18:15:{46 + i},{900 * (i + 1)},44\n" for i in range(8))
    (tmp_path / "azure.csv").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands(folder: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(COMMANDS) == 3
    for command, shown in COMMANDS:
        capsys.readouterr()
        assert main(shlex.split(command.replace("http://127.0.0.1:8000", url))[1:]) == 0
        parts = [re.escape(part) for part in shown.strip().split("…")]
        printed = capsys.readouterr().out
        assert re.search(".*".join(parts), printed, re.S), printed
    assert (folder / "out.html").exists()


@pytest.mark.parametrize("name", [name for name, _ in SPECS])
def test_the_specs(folder: Path, name: str) -> None:
    asks = list(open_workload(folder / name).requests())
    assert len(asks) > 3
    models = {"chat.yaml": {"sums", "guide", "stories"}, "busy.yaml": {"chat", "code", "batch"}}
    assert {ask.model for ask in asks} <= models.get(name, {"sums", "guide"})


def test_the_file(tmp_path: Path) -> None:
    [text] = re.findall(r'^```\n(\{"kvloom_workload".*?)^```', PAGE, re.M | re.S)
    (tmp_path / "w.jsonl").write_text(text.replace('"requests":60', '"requests":1'))
    workload = read_workload(tmp_path / "w.jsonl")
    assert [ask.shared[0].tokens for ask in workload.requests()] == [32]


def rows(heading: str, table: int = 0) -> list[list[str]]:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"(?:^\|.*\n)+", section, re.M)[table]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found.splitlines()[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_key() -> None:
    told = {names(key)[0]: (default.strip("`"), said) for key, default, said in rows("The spec")}
    assert told.keys() == WorkloadSpec.model_fields.keys()
    for key, (default, _) in told.items():
        field = WorkloadSpec.model_fields[key]
        if default == "none":
            assert field.default is None, key
    assert told["vocab"][0] == str(WorkloadSpec.model_fields["vocab"].default)
    assert f"from {LOWEST} to" in told["vocab"][1]


@pytest.mark.parametrize(
    ("told", "section"),
    [
        ("drift", Drift),
        ("system", SystemPrompts),
        ("conversation", Conversations),
        ("replay", ReplaySpec),
    ],
)
def test_every_key_of_a_section(told: str, section: type[BaseModel]) -> None:
    [text] = [said for key, _, said in rows("The spec") if names(key) == [told]]
    [inner] = re.findall(r"`\{(.*?)\}`", text)
    assert [part.split(":")[0].strip() for part in inner.split(",")] == list(section.model_fields)


def test_every_key_of_lengths_and_models() -> None:
    [inner] = re.findall(r"`lengths: \{(.*?)\}`", PAGE)
    assert inner.split(", ") == list(Lengths.model_fields)
    [said] = re.findall(r"Under a model's name: (.*?)\.\n\n", PAGE, re.S)
    assert names(said) == list(ModelSpec.model_fields)


def test_every_stand_in() -> None:
    assert [name for cell, _ in rows("The spec", 1) for name in names(cell)] == list(STAND_INS)


def test_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--help"]) == 0
    known = re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.M)
    told = [name.split()[0] for cell, _ in rows("Ask a server") for name in names(cell)]
    assert told == known
