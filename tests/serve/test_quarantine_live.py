"""A request whose engines die while they let it in is tried twice, and then no more: real processes."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvloom.config.config import DEMO
from tests.processes import DEADLINE
from tests.serve.streaming import asking, call, serving

CONFIG = f"""
kv_memory: 32MiB
block_bytes: 4KiB
models: {{guide: {DEMO}/guide, stories: {DEMO}/stories}}
units:
  - models: [stories]
  - models: [stories]
  - models: [stories, guide]
"""
KILLER = {"model": "stories", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
OTHER = {"model": "guide", "prompt": "What is a block?", "max_tokens": 400, "seed": 11, "ignore_eos": True}


def _text(url: str, body: dict[str, Any]) -> str:
    return str(call(url, "/v1/completions", body)["choices"][0]["text"])


def _refused(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the status and the error of a request that is refused."""
    with pytest.raises(urllib.error.HTTPError) as told:
        urllib.request.urlopen(asking(url, "/v1/completions", body), timeout=DEADLINE)
    return {"status": told.value.code, **json.load(told.value)["error"]}


def _until_asked(url: str, unit: str) -> None:
    """Waits until the gateway counts a call at the unit."""
    while not any(one["name"] == unit and one["calls"] for one in call(url, "/admin/units")):
        pass


def test_a_request_ends_two_engines_and_no_third(tmp_path: Path) -> None:
    with serving(tmp_path, CONFIG) as (running, url), ThreadPoolExecutor(3) as pool:
        whole = _text(url, OTHER)
        pids = running.children()
        for unit in ("unit-0", "unit-1"):  # which would have to let it in, and cannot
            os.kill(pids[unit], signal.SIGSTOP)
        killing = pool.submit(_refused, url, KILLER)
        _until_asked(url, "unit-0")
        beside = [pool.submit(_text, url, OTHER) for _ in range(2)]
        for unit in ("unit-0", "unit-1"):
            _until_asked(url, unit)
            os.kill(pids[unit], signal.SIGKILL)
            running.wait_for(f"{unit} | was killed by SIGKILL")
        told = killing.result(DEADLINE)
        assert (told["status"], told["code"]) == (400, "request_quarantined")
        assert [one.result(DEADLINE) for one in beside] == [whole, whole]
        again = _refused(url, KILLER)
        assert (again["status"], again["code"]) == (400, "request_quarantined")
        assert running.children()["unit-2"] == pids["unit-2"]
        assert _text(url, KILLER | {"prompt": "Once upon another time"})
        if "is quarantined (" not in running.output:
            running.wait_for("is quarantined (")
