"""A fleet whose keys have names, under the official client: its file of keys changes, breaks, and outlives a
gateway; and what an administrator does is written."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from kvloom.cli.__main__ import main
from kvloom.config.config import DEMO
from kvloom.config.keys import add_key, make_key, remove_key
from tests.processes import DEADLINE, Fleet, fleet

CONFIG = """\
kv_memory: 16MiB
models: {{sums: {demo}/sums, guide: {demo}/guide}}
keys: keys.yaml
audit_file: audit.jsonl
"""
ASK: dict[str, Any] = {"model": "sums", "prompt": "1 + 2 =", "max_tokens": 4, "temperature": 0}
READ = "keys.yaml: read again"


class Tenants:
    """A fleet, and its file of keys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "keys.yaml"
        self.url = ""
        (folder / "fleet.yaml").write_text(CONFIG.format(demo=DEMO))

    def add(self, name: str, **fields: Any) -> str:
        text, key = make_key(name, **fields)
        add_key(self.file, key)
        return text

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=DEADLINE)

    def order(self, key: str, *what: str) -> None:
        """What an administrator orders."""
        (self.folder / "own.txt").write_text(key)
        assert main([*what, "--url", self.url, "--admin-key-file", str(self.folder / "own.txt")]) == 0


def test_keys_a_changing_file_a_dying_gateway_and_an_audit_trail(tmp_path: Path) -> None:
    tenants = Tenants(tmp_path)
    few = tenants.add("few", requests_per_minute=1, models=["sums"])
    many = tenants.add("many", tokens_per_minute=100_000)
    ops = tenants.add("ops", admin=True)
    trail = tmp_path / "audit.jsonl"
    with fleet(str(tmp_path / "fleet.yaml"), folder=tmp_path) as running:
        tenants.url = running.wait_until_ready()
        check_limits(tenants.client(few), tenants.client(many))
        tenants.order(ops, "unit", "drain", "unit-0", "--seconds", "0")
        tenants.order(ops, "unit", "list")
        tenants.order(ops, "unit", "admit", "unit-0")
        check_changes(tenants, running, few, many)
        tenants.order(ops, "program", "set", "least_loaded")
        assert running.end(signal.SIGTERM) == 0  # what is to be written still is
        said = running.rest() + running.errors()
    for key in (few, many, ops):
        assert key not in said
        assert key not in trail.read_text()
    assert trail.stat().st_mode & 0o777 == 0o600
    check_trail([json.loads(line) for line in trail.read_text().splitlines()], str(tenants.file))


def check_limits(few: openai.OpenAI, many: openai.OpenAI) -> None:
    """One has used what it may, which the other does not notice."""
    raw = few.completions.with_raw_response.create(**ASK)
    assert raw.headers["x-ratelimit-remaining-requests"] == "0"
    with pytest.raises(openai.RateLimitError) as error:
        few.completions.create(**ASK)
    assert error.value.code == "rate_limit_exceeded"
    assert 0 < int(error.value.response.headers["retry-after"]) <= 60
    raw = many.completions.with_raw_response.create(**ASK)
    assert raw.headers["x-ratelimit-limit-tokens"] == "100000"
    assert [model.id for model in few.models.list()] == ["sums"]
    assert {model.id for model in many.models.list()} == {"sums", "guide"}
    with pytest.raises(openai.NotFoundError):
        few.models.retrieve("guide")


def check_changes(tenants: Tenants, running: Fleet, few: str, many: str) -> None:
    added = tenants.add("added")
    running.wait_for(READ)
    assert tenants.client(added).completions.create(**ASK).choices

    remove_key(tenants.file, "many")
    running.wait_for(READ)
    with pytest.raises(openai.AuthenticationError):
        tenants.client(many).completions.create(**ASK)

    broken = tenants.folder / "broken.yaml"
    broken.write_text("- name: [")
    broken.replace(tenants.file)  # at once: nobody reads a file that is empty
    assert "keys.yaml: line " in running.wait_for("the keys of before stay")
    assert tenants.client(added).completions.create(**ASK).choices

    os.kill(running.children()["gateway"], signal.SIGKILL)
    running.wait_for("the keys of before stay")
    assert tenants.client(added).completions.create(**ASK).choices
    # its counts were the gateway's that died
    assert tenants.client(few).completions.create(**ASK).choices
    with pytest.raises(openai.AuthenticationError):
        tenants.client(many).completions.create(**ASK)


def check_trail(lines: list[dict[str, Any]], file: str) -> None:
    assert [(line["who"], line["what"]) for line in lines] == [
        ("ops", "POST /admin/units/unit-0/drain"),
        ("ops", "POST /admin/units/unit-0/admit"),
        (None, file),
        (None, file),
        ("ops", "POST /admin/program"),
    ]
    assert lines[2]["before"] == ["few", "many", "ops"]
    assert lines[2]["after"] == ["few", "many", "ops", "added"]
    assert lines[3]["after"] == ["few", "ops", "added"]
    assert lines[4]["after"] == {"program": {"name": "least_loaded"}}
