"""The journal of a real fleet: a death, an order and a preemption are told, each with its reason."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.processes import DEADLINE
from tests.serve.streaming import asking, call, serving

CONFIG = """
kv_memory: 64MiB
models: {{llama: {path}}}
admin_key_file: {keys}
journal: {journal}
units: [{{models: [llama], replicas: 2}}]
"""
KEY = "an-admin-key-of-the-test"


def followed(url: str, until: Callable[[dict[str, Any]], bool], last: str = "") -> list[dict[str, Any]]:
    """The records up to the first one of which `until` holds, which must come."""
    request = asking(url, "/admin/events", key=KEY)
    if last:
        request.add_header("last-event-id", last)
    records: list[dict[str, Any]] = []
    with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer:
            if line.startswith(b"data: "):
                records.append(json.loads(line.removeprefix(b"data: ")))
                if until(records[-1]):
                    return records
    raise AssertionError(f"the journal ended: {records}")


def of(kind: str, component: str) -> Callable[[dict[str, Any]], bool]:
    return lambda record: (record["event"]["type"], record["component"]) == (kind, component)


def test_a_journal_tells_what_happens_and_why(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "llama", "llama")
    keys, journal = tmp_path / "keys", tmp_path / "journal.jsonl"
    keys.write_text(KEY + "\n")
    keys.chmod(0o600)
    config = CONFIG.format(path=checkpoint, keys=keys, journal=journal)
    with serving(tmp_path, config) as (fleet, url):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            call(url, "/admin/events")
        begun = followed(url, of("ready", "gateway/1"))
        assert {one["component"] for one in begun if one["event"]["type"] == "ready"} >= {"unit-0", "unit-1"}
        assert begun[0]["event"]["models"] == ["llama"]
        last = f"{begun[-1]['journal']}-{begun[-1]['number']}"

        os.kill(fleet.children()["unit-1"], signal.SIGKILL)
        told = followed(url, of("ready", "unit-1"), last)
        events = [one["event"] for one in told if one["component"] == "unit-1"]
        assert [event["type"] for event in events] == ["died", "starting", "ready"]
        assert "SIGKILL" in events[0]["reason"]

        call(url, "/admin/units/unit-0/drain", {"seconds": 5}, KEY)
        drained = followed(url, of("draining", "unit-0"), last)[-1]
        assert "ordered" in drained["event"]["reason"]
    kept = [json.loads(line) for line in journal.read_text().splitlines()]
    assert kept[: len(begun)] == begun
    assert drained in kept
