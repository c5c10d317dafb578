"""docs/programs.md: its program runs, its tables are the code's, and the example beside it is the same."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvloom.router.program import load_program
from kvloom.router.programs import PROGRAMS
from kvloom.router.replicas import Fleet
from tests.router.fleets import ask_well, body, routed

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "programs.md").read_text("utf-8")
EXAMPLE = ROOT / "examples" / "router_program.py"
[CODE] = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


def shown_options(program: Callable[..., Any]) -> list[str]:
    parameters = list(inspect.signature(program).parameters.values())[2:]
    return [f"{parameter.name}={parameter.default}" for parameter in parameters]


def test_the_table_is_what_is_shipped() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\| (.+) \|$", PAGE.split("\n## ")[1], re.M)
    told = {name: re.findall(r"`([^`]+)`", options) for name, options, _ in rows}
    assert told == {name: shown_options(program) for name, program in PROGRAMS.items()}


def test_what_a_fleet_can_do_is_told() -> None:
    told = set(re.findall(r"`fleet\.(\w+)", PAGE))
    able = {name for name in vars(Fleet) if not name.startswith("_")}
    ours = {"model", "replicas", "index", "copies", "arrival", "salt", "choices"}
    assert told == able - ours - {"note", "dropped", "to_compute", "without"}


def test_the_example_is_the_pages() -> None:
    source = EXAMPLE.read_text("utf-8")
    assert CODE.split("\n\n\n")[1].strip() in source


@pytest.mark.parametrize("where", ["page", "example"])
async def test_the_program_runs(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"own_{where}.py").write_text(
        CODE if where == "page" else EXAMPLE.read_text("utf-8"), "utf-8"
    )
    for units in (1, 2, 3):
        program = load_program(f"own_{where}:long_prompts_apart", {"tokens": "20"})
        async with routed(units, program) as fleets:
            for length in (1, 19, 20, 40, 19):
                await ask_well(fleets.router, body(length))
            sends = [call.end for call in fleets.journal if call.verb == "remote_send"]
            assert sends[:1] == ([] if units == 1 else [19])
