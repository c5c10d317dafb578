"""`kvloom serve` with two units that weave, of which the cold one dies, and is restarted. Real processes."""

from __future__ import annotations

import json
import os
import random
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from kvloom.cli.__main__ import main
from kvloom.types.request import Event, TokenEvent
from tests.checkpoints import VOCAB, make_checkpoint
from tests.oracle import Oracle
from tests.processes import DEADLINE
from tests.serve.streaming import call, serving
from tests.serve.test_log_live import eventually

COUNT = 30
CONFIG = """
kv_memory: 16MiB
block_bytes: 4KiB
threads: 2
models: {{hot: {hot}, cold: {cold}}}
units: [{{models: [hot]}}, {{models: [cold]}}]
weave: [{{hot: unit-0, cold: unit-1, share: 0.7}}]
"""


def generate(url: str, unit: str, model: str, name: str, prompt: list[int]) -> list[int]:
    """By the verb, which tells tokens."""
    sampling = {"max_tokens": COUNT, "seed": 1, "temperature": 0.0}
    body = {"model": model, "request": name, "prompt": prompt, "sampling": sampling}
    headers = {"content-type": "application/json", "accept": "application/json"}
    request = urllib.request.Request(f"{url}/verbs/{unit}/start_generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
        frames = [msgspec.json.decode(line, type=list[Event]) for line in answer if line.strip()]
    return [event.token for frame in frames for event in frame if isinstance(event, TokenEvent)]


def _lent(url: str) -> int:
    with suppress(urllib.error.HTTPError):  # The gateway has not heard yet that the unit is back.
        return int(call(url, "/verbs/unit-1/load")["lent_blocks"])
    return 0


def _borrows(url: str) -> bool:
    return bool(call(url, "/verbs/unit-0/load")["models"]["hot"]["away_share"])


def until_lent(url: str) -> None:
    eventually(lambda: _lent(url) > 0 and _borrows(url), "a loan")


def test_a_cold_unit_dies(tmp_path: Path) -> None:
    path, cold = make_checkpoint(tmp_path / "hot", "qwen3"), make_checkpoint(tmp_path / "cold", "gpt2")
    config = CONFIG.format(hot=path, cold=cold)
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice((2, 20, 70)))] for _ in range(12)]
    with ThreadPoolExecutor(12) as pool, serving(tmp_path, config) as (served, url):
        until_lent(url)

        def ask(turn: int, unit: str = "unit-0", model: str = "hot") -> Iterator[list[int]]:
            names = [f"{model}-{turn}-{i}" for i in range(len(prompts))]
            return pool.map(lambda name, prompt: generate(url, unit, model, name, prompt), names, prompts)

        asked, others = ask(0), list(ask(0, "unit-1", "cold"))
        found = list(asked)
        away = call(url, "/verbs/unit-0/load")["models"]["hot"]["away_tokens_total"]
        assert away > COUNT
        asked = ask(1)
        found.append(next(asked))  # it is under way
        os.kill(served.children()["unit-1"], signal.SIGKILL)
        found += asked
        served.wait_for("unit-1 | answers again")
        until_lent(url)
        asked = ask(2)
        found.append(next(asked))
        assert main(["unit", "restart", "unit-1", "--url", url]) == 0  # it lends, and has to go
        found += asked
        until_lent(url)
        found += ask(3)
        assert call(url, "/verbs/unit-0/load")["models"]["hot"]["away_tokens_total"] > away
    for oracle, all_tokens in ((Oracle(path), found), (Oracle(cold), others)):
        for prompt, tokens in zip(prompts * 4, all_tokens, strict=False):
            assert len(tokens) == COUNT
            oracle.check_at_once(prompt, tokens)
    assert (len(found), len(others)) == (4 * len(prompts), len(prompts))
