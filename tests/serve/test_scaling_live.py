"""Replicas that come with the load and go without it, and a model without any. Real processes and models."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.checkpoints import make_checkpoint
from tests.processes import Fleet
from tests.serve.streaming import call, said, serving, states, streams

# Units so small are less free than `low` where anything runs, and freer than `high` where nothing does.
CONFIG = """
kv_memory: 48MiB
models: {{hot: {hot}, cold: {cold}}}
rescheduling: {{period: 50ms}}
units:
  - {{models: [hot], replicas: {{most: 2, low: 1000000, high: 2000000, seconds: 1s}}}}
  - {{models: [cold], replicas: {{least: 0, most: 1, idle: 1s}}}}
"""


def wait(running: Fleet, *said: str) -> None:
    """In whatever order the fleet says so."""
    for words in said:
        if words not in running.output:
            running.wait_for(words)
    running.output = ""


def until(url: str, *wanted: str) -> None:
    """The gateway has heard of it too."""
    while tuple(states(url).values()) != wanted:
        pass


def test_replicas_follow_the_load_and_a_cold_model_comes_back(tmp_path: Path) -> None:
    paths = {
        name: make_checkpoint(tmp_path / name, kind) for name, kind in (("hot", "llama"), ("cold", "qwen2"))
    }
    with serving(tmp_path, CONFIG.format(**paths)) as (running, url):
        alone = said(url, "cold", 5, 40)
        with streams(url, 200, hot=1):
            wait(running, "unit-1 | answers", "unit-2 | has ended")
            until(url, "up", "up", "away")
        wait(running, "unit-1 | has ended")
        assert running.children().keys() == {"gateway", "unit-0", "scheduler"}

        assert {model["id"] for model in call(url, "/v1/models")["data"]} == {"hot", "cold"}
        os.kill(running.children()["gateway"], signal.SIGKILL)
        running.wait_for("gateway | answers again")
        until(url, "up", "away", "away")
        assert said(url, "cold", 5, 40) == alone
