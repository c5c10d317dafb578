"""`kvloom serve` with a unit of two ranks, one of which is killed. Real processes, a real checkpoint."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from kvloom.config.config import DEMO
from tests.processes import DEADLINE, fleet, leaves_nothing, outlived

CONFIG = f"""
kv_memory: 8MiB
block_bytes: 4KiB
models: {{sums: {DEMO}/sums}}
units: [{{models: [sums], tensor_parallel: 2}}]
"""
ALONE = "unit unit-0 is tensor-parallel: its K and V are neither sent nor received; "


def post(url: str, path: str, **body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def long_answer(url: str) -> HTTPResponse:
    body = {"model": "sums", "prompt": "1+1", "max_tokens": 60, "ignore_eos": True, "n": 2, "stream": True}
    body |= {"seed": 3, "temperature": 0.8}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    response: HTTPResponse = urllib.request.urlopen(request, timeout=DEADLINE)
    return response


def texts(stream: Iterable[bytes]) -> dict[int, str]:
    """By choice."""
    said: dict[int, str] = {}
    lines = [line.removeprefix(b"data: ").strip() for line in stream]
    assert lines[-2:] == [b"[DONE]", b""]
    for line in filter(None, lines[:-2]):
        for choice in json.loads(line)["choices"]:
            said[choice["index"]] = said.get(choice["index"], "") + choice["text"]
    assert len(said) == 2
    return said


def add(url: str, a: int, b: int) -> str:
    asked = [{"role": "user", "content": f"What is {a} + {b}?"}]
    status, answer = post(url, "/v1/chat/completions", model="sums", temperature=0, messages=asked)
    assert status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


def test_a_unit_of_two_ranks_and_the_death_of_one(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(CONFIG)
    folder = tmp_path / "s"
    folder.mkdir()
    with fleet(str(tmp_path / "fleet.yaml"), folder=folder) as running, ThreadPoolExecutor(4) as callers:
        url = running.wait_until_ready()
        before = running.children() | running.ranks("unit-0")
        assert before.keys() == {"gateway", "unit-0", "unit-0-rank-1"}
        sums = callers.map(lambda b: add(url, 17, b), range(20, 26))
        assert list(sums) == [f"17 + {b} = {17 + b}." for b in range(20, 26)]
        status, answer = post(url, "/verbs/unit-0/prep_recv", model="sums", request="r", prompt=[1, 2, 3])
        assert status == 400
        assert answer["message"].startswith(ALONE)

        with long_answer(url) as stream:
            whole = texts(stream)
        with long_answer(url) as stream:
            first = stream.readline()
            with outlived([before["unit-0"], before["unit-0-rank-1"]]):
                os.kill(before["unit-0-rank-1"], signal.SIGKILL)
            assert texts([first, *stream]) == whole
        running.wait_for("unit-0 | ERROR kvloom.serve.parent: unit-0: rank 1 was killed by SIGKILL")
        running.wait_for("unit-0 | ended with exit code 1; it starts again in 0.5 s")
        running.wait_for("unit-0 | answers again")
        assert add(url, 40, 2) == "40 + 2 = 42."

        after = running.ranks("unit-0")
        assert after.keys() == {"unit-0-rank-1"}
        with leaves_nothing(running, folder), outlived(list(after.values())):
            assert running.end(signal.SIGINT) == 0
        assert running.errors() == ""
