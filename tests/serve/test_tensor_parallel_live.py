"""`kvloom serve` with units of two ranks: streams move between them, and one of the ranks is killed. Real
processes, real checkpoints."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path

import pytest

from kvloom.config.config import DEMO
from tests.checkpoints import make_checkpoint
from tests.processes import DEADLINE, outlived
from tests.serve.streaming import asking, call, metric, said, serving, streamed, sum_of
from tests.serve.test_log_live import eventually

CONFIG = f"""
kv_memory: 8MiB
block_bytes: 4KiB
models: {{sums: {DEMO}/sums}}
units: [{{models: [sums], tensor_parallel: 2}}]
"""
TWO = """
kv_memory: 64MiB
models: {{llama: {path}}}
rescheduling: {{period: 50ms}}
units: [{{models: [llama], tensor_parallel: 2, replicas: 2}}]
"""
LONG, MOST = 900, 30_000  # tokens that are compared; those of a stream that nobody reads to its end


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


def texts_of(stream: HTTPResponse, count: int) -> list[str]:
    """The next pieces of a stream, or the rest of them."""
    found: list[str] = []
    for line in stream:
        event = line.removeprefix(b"data: ").strip()
        if event == b"[DONE]":
            break
        if event:
            found.append(json.loads(event)["choices"][0]["text"])
        if len(found) == count:
            break
    return found


def busy(url: str) -> str:
    """The one unit at which something runs."""
    loads = call(url, "/admin/fleet")["loads"]
    [unit] = [unit for unit, load in loads.items() if load["models"]["llama"]["running"]]
    return str(unit)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 4, reason="two units of two ranks need 4 cores")
def test_a_stream_moves_between_units_of_ranks_and_outlives_one(tmp_path: Path) -> None:
    """Its unit is drained, and then a rank of the unit where it has gone is killed."""
    model = make_checkpoint(tmp_path / "llama", "llama", max_position_embeddings=2 * MOST)
    with serving(tmp_path, TWO.format(path=model)) as (running, url):
        running.wait_for("scheduler | answers")
        lone = said(url, "llama", 7, LONG)
        request = streamed(url, "llama", 7, MOST)
        with urllib.request.urlopen(request, timeout=DEADLINE) as stream:
            text = texts_of(stream, 10)
            first = busy(url)
            assert call(url, f"/admin/units/{first}/drain", {})["state"] == "drained"
            second = busy(url)
            assert second != first
            assert call(url, "/admin/fleet")["loads"][second]["models"]["llama"]["received_tokens_total"]
            call(url, f"/admin/units/{first}/admit", {})
            text += texts_of(stream, 10)
            assert busy(url) == second
            os.kill(running.ranks(second)[f"{second}-rank-1"], signal.SIGKILL)
            running.wait_for(
                f"{second} | ERROR kvloom.serve.processes.parent: {second}: rank 1 was killed by SIGKILL"
            )
            running.wait_for(f"{second} | answers again")
            while len("".join(text)) < len(lone):
                text += texts_of(stream, 10)
        assert "".join(text).startswith(lone)
        assert metric(url, 'kvloom_moves_total{outcome="moved"}') == 1
        eventually(lambda: metric(url, "kvloom_kv_blocks_used") == 0, "blocks that are given back")
