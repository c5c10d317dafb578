"""`kvloom serve` with a unit of two ranks, one of which is killed. Real processes, a real checkpoint."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path

import pytest

from kvloom.config.config import DEMO
from tests.processes import DEADLINE, outlived
from tests.serve.streaming import asking, call, serving, sum_of

CONFIG = f"""
kv_memory: 8MiB
block_bytes: 4KiB
models: {{sums: {DEMO}/sums}}
units: [{{models: [sums], tensor_parallel: 2}}]
"""
ALONE = "unit unit-0 is tensor-parallel: its K and V are neither sent nor received; "


def long_answer(url: str) -> HTTPResponse:
    body = {"model": "sums", "prompt": "1+1", "max_tokens": 60, "ignore_eos": True, "n": 2, "stream": True}
    body |= {"seed": 3, "temperature": 0.8}
    response: HTTPResponse = urllib.request.urlopen(asking(url, "/v1/completions", body), timeout=DEADLINE)
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


def test_a_unit_of_two_ranks_and_the_death_of_one(tmp_path: Path) -> None:
    with ExitStack() as ended, serving(tmp_path, CONFIG) as (running, url), ThreadPoolExecutor(4) as callers:
        before = running.children() | running.ranks("unit-0")
        assert before.keys() == {"gateway", "unit-0", "unit-0-rank-1"}
        sums = callers.map(lambda b: sum_of(url, 17, b), range(20, 26))
        assert list(sums) == [f"17 + {b} = {17 + b}." for b in range(20, 26)]
        with pytest.raises(urllib.error.HTTPError) as refused:
            call(url, "/verbs/unit-0/prep_recv", {"model": "sums", "request": "r", "prompt": [1, 2, 3]})
        assert refused.value.code == 400
        assert json.load(refused.value)["message"].startswith(ALONE)

        with long_answer(url) as stream:
            whole = texts(stream)
        with long_answer(url) as stream:
            first = stream.readline()
            with outlived([before["unit-0"], before["unit-0-rank-1"]]):
                os.kill(before["unit-0-rank-1"], signal.SIGKILL)
            assert texts([first, *stream]) == whole
        running.wait_for("unit-0 | ERROR kvloom.serve.processes.parent: unit-0: rank 1 was killed by SIGKILL")
        running.wait_for("unit-0 | ended with exit code 1; it starts again in 0.5 s")
        running.wait_for("unit-0 | answers again")
        assert sum_of(url, 40, 2) == "40 + 2 = 42."

        after = running.ranks("unit-0")
        assert after.keys() == {"unit-0-rank-1"}
        ended.enter_context(outlived(list(after.values())))
