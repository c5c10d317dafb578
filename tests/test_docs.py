"""The tables of the docs against the code that they describe, and every link."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from kvloom.api.app import create_app  # noqa: F401  (all of the API's own errors are defined below it)
from kvloom.api.metrics import Metrics
from kvloom.api.schemas.chat import ChatBody
from kvloom.api.schemas.generation import CompletionBody, GenerationBody
from kvloom.cli.__main__ import main
from kvloom.config.config import Config
from kvloom.config.fields import parse_size
from kvloom.config.models import ModelConfig
from kvloom.config.units import UnitConfig
from kvloom.types.errors import KvloomError
from tests.cluster.loads import model, unit

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
SERVING = (ROOT / "docs" / "serving.md").read_text("utf-8")
SIZES = {"block_bytes", "cache_size", "max_body"}
NOT_OVER_HTTP = {"config_error", "out_of_blocks"}  # they end the start, or a request's wait for blocks


def rows(heading: str, table: int = 0) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    section = SERVING.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.M)
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in tables[table].splitlines()[2:]
    ]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize(("section", "table"), [(Config, 0), (ModelConfig, 1), (UnitConfig, 2)])
def test_every_config_key_and_its_default(section: type[BaseModel], table: int) -> None:
    told = {names(key)[0]: default.strip("`") for key, default, _ in rows("Config", table)}
    assert told.keys() == section.model_fields.keys()
    for key, field in section.model_fields.items():
        given: Any = told[key]
        if field.is_required():
            assert given == "required", key
        elif field.default is None:
            assert given == "none", key
        elif isinstance(field.default, Path):
            assert given == str(field.default), key
        elif isinstance(field.default, BaseModel):
            assert type(field.default).model_validate(yaml.safe_load(given)) == field.default, key
        else:
            assert (parse_size(given) if key in SIZES else yaml.safe_load(given)) == field.default, key


def test_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    options = capsys.readouterr().out.split("\nParameters:\n")[1].split("\nexamples:")[0]
    known = ["--help", *re.findall(r"^  (--[a-z-]+)", options, re.M)]
    assert {names(flag)[0].split()[0] for flag, _ in rows("Flags")} == set(known)


def test_every_parameter() -> None:
    shared, chat, completion = (
        {name for cell, *_ in rows("Parameters", table) for name in names(cell)} for table in range(3)
    )
    assert shared == GenerationBody.model_fields.keys()
    assert shared | chat == ChatBody.model_fields.keys()
    assert shared | completion == CompletionBody.model_fields.keys()


def all_kinds(kind: type[KvloomError]) -> set[type[KvloomError]]:
    return {kind}.union(*(all_kinds(child) for child in kind.__subclasses__()))


def test_every_error() -> None:
    told = {(int(status), names(code)[0]) for status, code, _ in rows("Errors")}
    kinds = {kind for kind in all_kinds(KvloomError) if kind.__module__.startswith("kvloom.")}
    assert told == {(kind.status, kind.code) for kind in kinds if kind.code not in NOT_OVER_HTTP}


def test_every_metric() -> None:
    text = Metrics().render({"unit-0": unit(model())}, {"unit-0": "up"}, {"moved": 0}, {}).decode()
    assert {(names(name)[0], kind) for name, kind, _ in rows("Metrics")} == set(
        re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8")):
        assert link.startswith("http") or (page.parent / link).exists(), link
