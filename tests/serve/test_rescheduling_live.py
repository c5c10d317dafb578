"""The fleet scheduler as a process: units that drain are emptied by moves. Real processes and models."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

from tests.checkpoints import make_checkpoint
from tests.processes import DEADLINE, Fleet
from tests.serve.streaming import call, metric, serving, streamed
from tests.serve.test_log_live import eventually

MOST = 30_000  # tokens of a stream: what takes half a minute
CONFIG = """
kv_memory: 64MiB
models: {{llama: {path}}}
rescheduling: {{period: 50ms}}
units: [{{models: [llama], replicas: 2}}]
"""


class Stream:
    """A stream that does not end by itself, and that a thread reads until it is told to hang up."""

    def __init__(self, url: str, pool: ThreadPoolExecutor) -> None:
        """It is well under way when this returns."""
        self._pieces: list[str] = []
        self._come = threading.Condition()
        self._over = threading.Event()
        self._reading = pool.submit(self._read, url)
        self.until(10)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def more(self) -> None:
        """Waits for more of it."""
        self.until(len(self._pieces) + 20)

    def until(self, count: int) -> None:
        """Waits for so many pieces."""
        with self._come:
            assert self._come.wait_for(lambda: len(self._pieces) >= count, DEADLINE)

    def hang_up(self) -> str:
        """Returns what was said."""
        self._over.set()
        self._reading.result(DEADLINE)
        return self.text

    def broken(self) -> str:
        """Waits until it breaks, and returns what was said."""
        with suppress(OSError, HTTPException):
            self._reading.result(DEADLINE)
        return self.text

    def _read(self, url: str) -> None:
        with urllib.request.urlopen(streamed(url, "llama", 7, MOST), timeout=DEADLINE) as response:
            for line in response:
                event = line.removeprefix(b"data: ").strip()
                assert event != b"[DONE]"
                if event:
                    with self._come:
                        self._pieces.append(json.loads(event)["choices"][0]["text"])
                        self._come.notify_all()
                if self._over.is_set():
                    return


def busy(url: str) -> list[str]:
    """Units at which something of the model runs, by their last reports, which come after tokens do."""
    loads = call(url, "/admin/fleet")["loads"]
    return [unit for unit, load in loads.items() if load["models"].get("llama", {}).get("running")]


def home(url: str, but: str = "") -> str:
    """Waits until one unit alone is busy, which is another than `but`, and returns it."""
    found: list[str] = []

    def alone() -> bool:
        found[:] = busy(url)
        return len(found) == 1 and found[0] != but

    eventually(alone, f"one busy unit, which is not {but!r}")
    return found[0]


def moved(url: str) -> float:
    return metric(url, 'kvloom_moves_total{outcome="moved"}')


def drained(url: str, stream: Stream) -> None:
    """The unit where the stream runs is emptied while it goes on, and admitted again."""
    unit = home(url)
    before = moved(url)
    state = call(url, f"/admin/units/{unit}/drain", {})
    assert (state["state"], state["calls"]) == ("drained", 0)
    stream.more()
    home(url, but=unit)
    # the source lets it go before the move is counted
    eventually(lambda: moved(url) == before + 1, "the count of the move")
    call(url, f"/admin/units/{unit}/admit", {})


def kill(running: Fleet, component: str) -> None:
    os.kill(running.children()[component], signal.SIGKILL)
    running.wait_for(f"{component} | was killed by SIGKILL")


def test_streams_leave_a_unit_that_drains_whoever_dies(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "llama", "llama", max_position_embeddings=2 * MOST)
    config = CONFIG.format(path=model)
    with serving(tmp_path, config) as (running, url), ThreadPoolExecutor() as pool:

        def begun() -> Stream:
            """A stream that is alone."""
            eventually(lambda: not busy(url), "the end of those that were hung up")
            return Stream(url, pool)

        running.wait_for("scheduler | answers")
        stream = begun()
        drained(url, stream)
        kill(running, "scheduler")
        stream.more()
        found = [stream.hang_up()]
        running.wait_for("scheduler | answers again")
        stream = begun()
        drained(url, stream)
        found.append(stream.hang_up())

        scheduler = running.children()["scheduler"]
        stream = begun()
        kill(running, "gateway")
        found.append(stream.broken())
        running.wait_for("gateway | answers again")
        stream = begun()  # the engines abort what the gateway had asked for
        drained(url, stream)
        found.append(stream.hang_up())
        assert running.children()["scheduler"] == scheduler
        lone = begun()
        while len(lone.text) < max(map(len, found)):
            lone.more()
        lone.hang_up()
        for text in found:
            assert lone.text.startswith(text)
