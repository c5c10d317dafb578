"""A rolling restart of a whole fleet under load. Real processes and models."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvloom.cli.__main__ import main
from tests.checkpoints import make_checkpoint
from tests.processes import DEADLINE
from tests.serve.streaming import call, serving, states, streams

CONFIG = """
kv_memory: 64MiB
models: {{llama: {llama}, qwen2: {qwen2}}}
rescheduling: {{period: 50ms}}
units:
  - models: [llama]
  - models: [llama, qwen2]
"""


@contextmanager
def kept_alive(url: str) -> Iterator[list[int]]:
    """Requests over one connection, as long as the server keeps it. Gives their statuses."""
    statuses: list[int] = []
    over = threading.Event()

    def work() -> None:
        line = http.client.HTTPConnection(urlsplit(url).netloc, timeout=DEADLINE)
        ask = json.dumps({"model": "llama", "prompt": [1, 2], "max_tokens": 16, "ignore_eos": True})
        while not over.wait(0.02):  # the cores are the fleet's too
            line.request("POST", "/v1/completions", ask, {"content-type": "application/json"})
            answer = line.getresponse()
            answer.read()
            statuses.append(answer.status)

    with ThreadPoolExecutor() as pool:
        working = pool.submit(work)
        try:
            yield statuses
        finally:
            over.set()
        working.result()


def test_a_rolling_restart_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one model on two units, and of one that is alone on its unit and waits."""
    models = {kind: make_checkpoint(tmp_path / kind, kind) for kind in ("llama", "qwen2")}
    with serving(tmp_path, CONFIG.format(**models)) as (running, url):
        running.wait_for("scheduler | answers")
        before, forks = running.children(), running.fork_server()
        with streams(url, 150, llama=1, qwen2=1) as ended, kept_alive(url) as statuses:
            with ThreadPoolExecutor() as pool:
                os.kill(forks, signal.SIGSTOP)  # no engine starts, so the first unit's restart takes its time
                rolling = pool.submit(main, ["restart", "--rolling", "--url", url])
                while "restarting" not in states(url).values():
                    pass
                with pytest.raises(urllib.error.HTTPError) as refused:
                    call(url, "/admin/restart", {})
                said = json.load(refused.value)["error"]
                assert (refused.value.code, said["code"]) == (409, "conflict")
                assert "a rolling restart is under way, at unit-0" in said["message"]
                os.kill(forks, signal.SIGCONT)
                assert rolling.result() == 0
            count = len(ended)
            while len(ended) < count + 3 or not statuses:  # the new gateway serves
                pass
        assert {*statuses} == {200}
        lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
        assert lines == [
            [component, state]
            for component in ("unit-0", "unit-1", "scheduler", "gateway")
            for state in ("restarting", "restarted")
        ]
        while {*before.values()} & {*running.children().values()}:  # the old gateway ends by itself
            pass
        assert running.children().keys() == before.keys()
        assert states(url) == {"unit-0": "up", "unit-1": "up"}
    assert "Traceback" not in running.output
