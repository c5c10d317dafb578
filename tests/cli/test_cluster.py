"""The commands for several hosts where Ray is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvloom.cli.__main__ import main
from kvloom.config.config import DEMO

MODELS = f"models: {{sums: {{path: {DEMO}/sums, rate: 1}}}}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--model", f"sums={DEMO}/sums", "--cluster", "auto"],
        ["plan", "models.yaml", "--cluster", "auto"],
        ["cluster", "start", "--head"],
        ["cluster", "join", "10.0.0.1:6379"],
        ["cluster", "stop"],
    ],
    ids=" ".join,
)
def test_one_line_says_how_to_install_it(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # Imports of it fail, as if it were not there.
    monkeypatch.chdir(tmp_path)
    Path("models.yaml").write_text(MODELS)
    assert main(arguments) == 2
    assert capsys.readouterr().err == (
        "kvloom: Ray is not installed; `pip install '.[cluster]'` in kvloom's checkout installs it\n"
    )
