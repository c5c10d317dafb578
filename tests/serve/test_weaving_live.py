"""`kvloom serve` with two units that weave, of which the cold one is killed. Real processes and models."""

from __future__ import annotations

import json
import os
import random
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from kvloom.core.request import Event, TokenEvent
from tests.checkpoints import VOCAB, make_checkpoint
from tests.oracle import Oracle
from tests.processes import DEADLINE, fleet, leaves_nothing

COUNT = 30
CONFIG = """
kv_memory: 16MiB
block_bytes: 4KiB
threads: 2
models: {{hot: {hot}, cold: {cold}}}
units: [{{models: [hot]}}, {{models: [cold]}}]
weave: [{{hot: unit-0, cold: unit-1, share: 0.7}}]
"""


def get(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=DEADLINE) as answer:
        return json.load(answer)


def generate(url: str, name: str, prompt: list[int]) -> list[int]:
    """By the verb, which tells tokens."""
    sampling = {"max_tokens": COUNT, "seed": 1, "temperature": 0.0}
    body = {"model": "hot", "request": name, "prompt": prompt, "sampling": sampling}
    headers = {"content-type": "application/json", "accept": "application/json"}
    request = urllib.request.Request(f"{url}/verbs/unit-0/start_generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
        frames = [msgspec.json.decode(line, type=list[Event]) for line in answer if line.strip()]
    return [event.token for frame in frames for event in frame if isinstance(event, TokenEvent)]


def until_lent(url: str) -> None:
    end = time.monotonic() + DEADLINE
    while not get(url, "/verbs/unit-1/load")["lent_blocks"]:
        assert time.monotonic() < end, "the cold unit never lends"


def test_a_fleet_weaves_and_goes_on_when_the_cold_unit_dies(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "hot", "qwen3")
    config = tmp_path / "fleet.yaml"
    config.write_text(CONFIG.format(hot=path, cold=make_checkpoint(tmp_path / "cold", "gpt2")))
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice((2, 20, 70)))] for _ in range(12)]
    (tmp_path / "run").mkdir()
    with ThreadPoolExecutor(6) as pool, fleet(str(config), folder=tmp_path / "run") as served:
        url = served.wait_until_ready()
        until_lent(url)

        def ask(turn: int) -> list[list[int]]:
            names = [f"{turn}-{i}" for i in range(len(prompts))]
            return list(pool.map(lambda name, prompt: generate(url, name, prompt), names, prompts))

        found = ask(0)
        away = get(url, "/verbs/unit-0/load")["models"]["hot"]["away_tokens_total"]
        assert away > COUNT
        os.kill(served.children()["unit-1"], signal.SIGKILL)
        found += ask(1)
        served.wait_for("unit-1 | answers again")
        until_lent(url)
        found += ask(2)
        assert get(url, "/verbs/unit-0/load")["models"]["hot"]["away_tokens_total"] > away
        with leaves_nothing(served, tmp_path / "run"):
            assert served.end(signal.SIGTERM) == 0
    oracle = Oracle(path)
    for prompt, tokens in zip(prompts * 3, found, strict=True):
        assert len(tokens) == COUNT
        oracle.check_at_once(prompt, tokens)
