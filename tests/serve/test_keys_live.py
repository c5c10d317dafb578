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

from kvloom.config.config import DEMO
from kvloom.config.keys import add_key, make_key, remove_key
from tests.commands import kvloom
from tests.processes import Fleet, fleet

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
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def order(self, key: str, *what: str) -> None:
        """What an administrator orders."""
        (self.folder / "own.txt").write_text(key)
        ended = kvloom(*what, "--url", self.url, "--admin-key-file", str(self.folder / "own.txt"))
        assert ended.returncode == 0, ended.stderr


def test_two_keys_a_changing_file_and_a_dying_gateway(tmp_path: Path) -> None:
    tenants = Tenants(tmp_path)
    few = tenants.add("few", requests_per_minute=1, models=["sums"])
    many = tenants.add("many", tokens_per_minute=100_000)
    with fleet(str(tmp_path / "fleet.yaml"), folder=tmp_path) as running:
        tenants.url = running.wait_until_ready()
        check_limits(tenants.client(few), tenants.client(many))
        check_changes(tenants, running, few, many)
        assert running.end(signal.SIGTERM) == 0
        said = running.rest() + running.errors()
    assert few not in said
    assert many not in said


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

    tenants.file.write_text("- name: [")
    assert "keys.yaml: line " in running.wait_for("the keys of before stay")
    assert tenants.client(added).completions.create(**ASK).choices

    os.kill(running.children()["gateway"], signal.SIGKILL)
    running.wait_for("the keys of before stay")
    assert tenants.client(added).completions.create(**ASK).choices
    # its counts were the gateway's that died
    assert tenants.client(few).completions.create(**ASK).choices
    with pytest.raises(openai.AuthenticationError):
        tenants.client(many).completions.create(**ASK)


def test_what_an_administrator_does_is_written(tmp_path: Path) -> None:
    tenants = Tenants(tmp_path)
    ops = tenants.add("ops", admin=True)
    trail = tmp_path / "audit.jsonl"
    with fleet(str(tmp_path / "fleet.yaml"), folder=tmp_path) as running:
        tenants.url = running.wait_until_ready()
        tenants.order(ops, "unit", "drain", "unit-0", "--seconds", "0")
        tenants.order(ops, "unit", "list")
        tenants.order(ops, "unit", "admit", "unit-0")
        tenants.add("added")
        running.wait_for(READ)
        tenants.order(ops, "program", "set", "least_loaded")
        assert running.end(signal.SIGTERM) == 0  # what is to be written still is
    assert trail.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in trail.read_text().splitlines()]
    assert [(line["who"], line["what"]) for line in lines] == [
        ("ops", "POST /admin/units/unit-0/drain"),
        ("ops", "POST /admin/units/unit-0/admit"),
        (None, str(tenants.file)),
        ("ops", "POST /admin/program"),
    ]
    assert (lines[2]["before"], lines[2]["after"]) == (["ops"], ["ops", "added"])
    assert lines[3]["after"] == {"program": {"name": "least_loaded"}}
    assert ops not in trail.read_text()
