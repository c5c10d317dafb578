"""A fleet whose gateway and fleet scheduler hang, and whose programs do what they like. Real processes."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvloom.cli.__main__ import main
from kvloom.config.config import DEMO
from tests.processes import DEADLINE, Fleet
from tests.serve.streaming import call, said, serving, streamed

CONFIG = f"""
kv_memory: 32MiB
block_bytes: 4KiB
watchdog: 8s
models: {{sums: {DEMO}/sums, stories: {DEMO}/stories}}
units:
  - {{models: [sums, stories], replicas: 2}}
"""
PROGRAMS = """
import time

async def exits(call, fleet):
    raise SystemExit(3)
    yield

async def exits_later(call, fleet):
    async for frame in call.start_generate(fleet.up[0]):
        yield frame
        if frame:
            raise KeyboardInterrupt

async def loops(call, fleet):
    while True:
        print("it loops", flush=True)
        time.sleep(1000)
    yield
"""
STREAMS, TOKENS = 30, 300
HANGS = "did not answer any more and was killed"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[queue.Queue[bytes]]:
    """What a service manager is told, which wants five signs of life a second."""
    address = str(tmp_path_factory.mktemp("manager") / "socket")
    told: queue.Queue[bytes] = queue.Queue()

    def listen() -> None:
        while words := manager.recv(100):
            told.put(words)

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, pytest.MonkeyPatch.context() as patch:
        manager.bind(address)
        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        patch.setenv("NOTIFY_SOCKET", address)
        patch.setenv("WATCHDOG_USEC", "200000")
        yield told
        manager.shutdown(socket.SHUT_RD)
        listener.join(DEADLINE)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, told: queue.Queue[bytes]) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "wild.py").write_text(PROGRAMS)
    with serving(folder, CONFIG) as (fleet, url):
        fleet.url = url
        fleet.wait_for("scheduler | answers")
        yield fleet
    until(told, b"STOPPING=1")


def until(told: queue.Queue[bytes], words: bytes) -> None:
    while told.get(timeout=DEADLINE) != words:
        pass


def shown(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """What `kvloom program show` says, and what it says besides."""
    capsys.readouterr()
    assert main(["program", "show", "--url", fleet.url]) == 0
    said = capsys.readouterr()
    return said.out.strip(), said.err.strip()


def set_program(fleet: Fleet, name: str) -> None:
    assert main(["program", "set", name, "--url", fleet.url]) == 0


def outcome(url: str, begun: threading.Barrier | None = None) -> str | None:
    """A stream's text; None if it broke. begun: where it waits once its answer has begun."""
    text = ""
    try:
        with urllib.request.urlopen(streamed(url, "stories", 7, TOKENS), timeout=DEADLINE) as response:
            if begun is not None:
                begun.wait(DEADLINE)
            for line in filter(bytes.strip, response):
                event = line.removeprefix(b"data: ").strip()
                if event == b"[DONE]":
                    return text
                text += json.loads(event)["choices"][0]["text"]
    except (http.client.HTTPException, OSError, KeyError):
        pass
    return None


def test_a_service_manager_is_told_how_a_fleet_stands(running: Fleet, told: queue.Queue[bytes]) -> None:
    """Its end is told too, as the fixture looks."""
    until(told, b"READY=1")
    for _ in range(3):
        until(told, b"WATCHDOG=1")
    for pid in running.children().values():
        assert b"NOTIFY_SOCKET" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_program_that_ends_the_process_ends_nothing(running: Fleet) -> None:
    before = running.children()
    alone = said(running.url, "stories", 7, TOKENS)
    set_program(running, "wild:exits")
    assert said(running.url, "stories", 7, TOKENS) == alone
    set_program(running, "wild:exits_later")
    assert outcome(running.url) is None
    set_program(running, "data_parallel")
    assert running.children() == before
    assert said(running.url, "stories", 7, TOKENS) == alone


def test_what_hangs_is_replaced_under_thirty_streams(
    running: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program blocks the gateway, and the fleet scheduler is stopped. Who asks meanwhile is answered by the
    next gateway, where the program before runs again."""
    url, before, alone = running.url, running.children(), said(running.url, "stories", 7, TOKENS)
    with ThreadPoolExecutor(STREAMS + 2) as pool:
        begun = threading.Barrier(STREAMS + 1)
        streams = [pool.submit(outcome, url, begun) for _ in range(STREAMS)]
        begun.wait(DEADLINE)
        set_program(running, "wild:loops")
        out, err = shown(running, capsys)
        assert out == "wild:loops"
        assert err == "It was set less than a minute ago, and is on probation."
        os.kill(before["scheduler"], signal.SIGSTOP)
        streams.append(pool.submit(outcome, url))
        running.wait_for("it loops")
        late = pool.submit(said, url, "stories", 7, TOKENS)
        found = [stream.result(DEADLINE) for stream in streams]
        assert {None} <= {*found} <= {None, alone}
        assert late.result(DEADLINE) == alone
    line = running.wait_for("data_parallel runs again")
    assert f"the gateway {HANGS} less than a minute after the program wild:loops was set" in line
    for name in ("gateway", "scheduler"):
        if f"{name} | answers again" not in running.output:
            running.wait_for(f"{name} | answers again")
        assert f"{name} | {HANGS}" in running.output
    after = running.children()
    assert {name for name in before if before[name] != after[name]} == {"gateway", "scheduler"}
    out, err = shown(running, capsys)
    assert out == "data_parallel"
    assert err == f"wild:loops was set before, and the gateway {HANGS}."
    state = call(url, "/admin/program")
    assert state["reverted"] == {"program": {"name": "wild:loops", "options": {}}, "problem": HANGS}
    set_program(running, "least_loaded")
    assert "reverted" not in call(url, "/admin/program")


def test_so_is_one_whose_gateway_is_killed(running: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    set_program(running, "wild:exits")
    os.kill(running.children()["gateway"], signal.SIGKILL)
    running.wait_for("data_parallel runs again")
    running.wait_for("gateway | answers again")
    assert shown(running, capsys)[0] == "data_parallel"
