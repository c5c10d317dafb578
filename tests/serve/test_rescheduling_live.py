"""The fleet scheduler as a process: units that drain are emptied by moves. Real processes and models."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tests.checkpoints import make_checkpoint
from tests.processes import DEADLINE, Fleet
from tests.serve.streaming import call, metric, serving, streamed

MOST = 4000  # tokens of a stream: many times what a move takes
CONFIG = """
kv_memory: 64MiB
models: {{llama: {path}}}
rescheduling: {{period: 50ms}}
units: [{{models: [llama], replicas: 2}}]
"""


class Streams:
    """Long streams of one fleet, by threads."""

    def __init__(self, url: str, pool: ThreadPoolExecutor) -> None:
        self._url = url
        self._pool = pool

    def begin(self, seed: int) -> Future[str]:
        """One, once it is well under way; at last its text."""
        under_way = threading.Event()
        said = self._pool.submit(self._said, seed, under_way)
        assert under_way.wait(DEADLINE)
        return said

    def _said(self, seed: int, under_way: threading.Event) -> str:
        request = streamed(self._url, "llama", seed, MOST)
        pieces: list[str] = []
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE) as response:
                for line in response:
                    event = line.removeprefix(b"data: ").strip()
                    if event and event != b"[DONE]":
                        pieces.append(json.loads(event)["choices"][0]["text"])
                    if len(pieces) == 10:
                        under_way.set()
        finally:
            under_way.set()
        assert event == b"[DONE]" or not line.strip()
        return "".join(pieces)


def busy(url: str) -> list[str]:
    """Units at which something runs."""
    loads = call(url, "/admin/fleet")["loads"]
    return [unit for unit, load in loads.items() if load["models"]["llama"]["running"]]


def moved(url: str) -> float:
    return metric(url, 'kvloom_moves_total{outcome="moved"}')


def drained(url: str, stream: Future[str]) -> None:
    """The unit where the stream runs is emptied while it goes on, and admitted again."""
    [unit] = busy(url)
    before = moved(url)
    state = call(url, f"/admin/units/{unit}/drain", {})
    assert (state["state"], state["calls"]) == ("drained", 0)
    assert not stream.done()
    [elsewhere] = busy(url)
    assert elsewhere != unit
    while not stream.done() and moved(url) == before:  # the source lets it go before the move is counted
        pass
    assert moved(url) == before + 1
    call(url, f"/admin/units/{unit}/admit", {})


def kill(running: Fleet, component: str) -> None:
    os.kill(running.children()[component], signal.SIGKILL)
    running.wait_for(f"{component} | was killed by SIGKILL")


def test_streams_leave_a_unit_that_drains_whoever_dies(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "llama", "llama", max_position_embeddings=2 * MOST)
    config = CONFIG.format(path=model)
    with serving(tmp_path, config) as (running, url), ThreadPoolExecutor() as pool:
        streams = Streams(url, pool)
        running.wait_for("scheduler | answers")
        lone = streams.begin(7).result()

        stream = streams.begin(7)
        drained(url, stream)
        kill(running, "scheduler")
        assert stream.result() == lone
        running.wait_for("scheduler | answers again")
        stream = streams.begin(7)
        drained(url, stream)
        assert stream.result() == lone

        scheduler = running.children()["scheduler"]
        broken = streams.begin(7)
        kill(running, "gateway")
        assert broken.exception() is not None or broken.result() != lone
        running.wait_for("gateway | answers again")
        while busy(url):  # the engines abort what it had asked for
            pass
        stream = streams.begin(7)
        drained(url, stream)
        assert stream.result() == lone
        assert running.children()["scheduler"] == scheduler
