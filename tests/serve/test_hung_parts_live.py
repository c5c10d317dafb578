"""Every process of a fleet is stopped for a moment, and all but the gateway are killed, under 30 streams.
Each says exactly what it says alone. What the processes hold afterwards is what they held before."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from kvloom.config.config import DEMO
from tests.footprint import Footprint
from tests.processes import DEADLINE, Fleet
from tests.serve.streaming import asking, serving, streams
from tests.serve.test_log_live import eventually

CONFIG = f"""
kv_memory: 64MiB
models: {{stories: {DEMO}/stories, sums: {DEMO}/sums}}
units: [{{models: [stories, sums], replicas: 2}}]
"""
STREAMS, TOKENS = 15, 20  # of each model
MOMENT = 0.5  # seconds; less than any question after a process's health has to be answered
PARTS = ("unit-0", "unit-1", "scheduler", "forkserver", "gateway")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with serving(tmp_path_factory.mktemp("hung"), CONFIG) as (fleet, url):
        fleet.url = url
        yield fleet


def process(running: Fleet, part: str) -> int:
    """Returns its id; 0 if there is none for now."""
    if part != "forkserver":
        return running.children().get(part, 0)
    try:
        return running.fork_server()
    except KeyError:
        return 0


def test_stopped_for_a_moment(running: Fleet) -> None:
    with streams(running.url, TOKENS, stories=STREAMS, sums=STREAMS) as ended:
        for part in PARTS:
            pid, before = process(running, part), len(ended)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(MOMENT)
            os.kill(pid, signal.SIGCONT)
            eventually(lambda before=before: len(ended) >= before + 2 * STREAMS, "streams")  # type: ignore[misc]
            assert process(running, part) == pid


def held(running: Fleet) -> dict[str, Footprint]:
    parts = {part: process(running, part) for part in PARTS} | {"supervisor": running.process.pid}
    return {part: Footprint.of(pid) for part, pid in parts.items()}


BAD = [
    {"model": "sums", "prompt": "x", "guided_regex": "("},
    {"model": "sums", "prompt": "x", "guided_json": {"$ref": "#"}},
    {"model": "sums", "prompt": "x" * 100_000},
    {"model": "sums", "prompt": ["x"] * 500, "n": 128},
    {"model": "none", "prompt": "x"},
    {"model": "sums", "prompt": "x", "n": 2**80},
]


def attack(url: str) -> None:
    """Asks what makes no sense, hangs up, and leaves answers unread."""
    host, port = url.removeprefix("http://").split(":")
    for body in BAD * 5:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asking(url, "/v1/completions", body), timeout=DEADLINE)
        assert refused.value.code in (400, 404), (str(body)[:80], refused.value.read())
        refused.value.close()
    long = {
        "model": "stories",
        "prompt": "Once",
        "max_tokens": 300,
        "ignore_eos": True,
        "stream": True,
        "n": 4,
    }
    body = json.dumps(long).encode()
    whole = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    for number in range(60):
        with socket.create_connection((host, int(port))) as one:
            one.sendall((whole, whole[:-9], b"\0garbage\r\n\r\n", b"GET")[number % 4])
            if number % 4 == 0:
                one.recv(64)


def test_an_attack_leaves_nothing_behind(running: Fleet) -> None:
    attack(running.url)  # what is loaded and started with first use
    before = held(running)
    attack(running.url)

    def grown() -> list[str]:
        now = held(running)
        return [f"{part}: {what}" for part in now if (what := before[part].growth(now[part], share=0.05))]

    eventually(lambda: not grown(), "an end of what was begun")


def test_killed(running: Fleet) -> None:
    """The fork server first: the engines that it forked live on, but are not found any more."""
    pids = {part: process(running, part) for part in PARTS}
    with streams(running.url, TOKENS, stories=STREAMS, sums=STREAMS) as ended:
        for part in ("forkserver", "unit-0", "unit-1", "scheduler"):
            os.kill(pids[part], signal.SIGKILL)
            before = len(ended)
            eventually(lambda part=part: process(running, part) not in (0, pids[part]), part)  # type: ignore[misc]
            eventually(lambda before=before: len(ended) >= before + 2 * STREAMS, "streams")  # type: ignore[misc]
