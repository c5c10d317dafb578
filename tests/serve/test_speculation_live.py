"""Streams of a model that speculates are those of the same weights without drafts, also if engines die and
requests move meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.checkpoints import make_repeating
from tests.processes import DEADLINE
from tests.serve.streaming import asking, serving

CONFIG = """
kv_memory: 64MiB
block_bytes: 4KiB
threads: 1
models:
  plain: {path}
  fast: {{path: {path}, speculation: {how}}}
  small: {small}
units: [{{models: [plain, fast, small], replicas: 2}}]
"""
STREAMS, SOON, LONG = 4, 8, 300  # streams; pieces of each after which the engines die; tokens of an answer


def pieces(url: str, model: str, seed: int) -> Iterator[str]:
    body = {"prompt": f"hello {seed}", "max_tokens": LONG, "temperature": 0.3, "seed": seed, "stream": True}
    asked = asking(url, "/v1/completions", body | {"model": model, "ignore_eos": True})
    with urllib.request.urlopen(asked, timeout=DEADLINE) as answer:
        for line in answer:
            data = line.strip().removeprefix(b"data: ")
            if data.startswith(b"{"):
                yield json.loads(data)["choices"][0]["text"]


def accepted(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=DEADLINE) as answer:
        text = answer.read().decode()
    found = re.findall(r'^kvloom_spec_decode_accepted_tokens_total\{.*"fast".*\} (\S+)$', text, re.MULTILINE)
    return sum(map(float, found))


@pytest.mark.parametrize("how", ["ngram", "small"])
def test_drafts_change_no_stream_while_engines_die(tmp_path: Path, how: str) -> None:
    path, small = make_repeating(tmp_path / "model"), make_repeating(tmp_path / "small", seed=1, layers=1)
    with serving(tmp_path, CONFIG.format(path=path, small=small, how=how)) as (fleet, url):
        alone = ["".join(pieces(url, "plain", seed)) for seed in range(STREAMS)]

        def kill() -> None:
            for unit in ("unit-0", "unit-1"):  # both, so that no stream is spared
                os.kill(fleet.children()[unit], signal.SIGKILL)

        meeting = threading.Barrier(STREAMS, action=kill, timeout=DEADLINE)

        def read(seed: int) -> str:
            text = ""
            for count, piece in enumerate(pieces(url, "fast", seed), 1):
                text += piece
                if count == SOON:
                    meeting.wait()
            return text

        with ThreadPoolExecutor(STREAMS) as pool:
            said = list(pool.map(read, range(STREAMS)))
        assert said == alone
        until = threading.Event()
        for _ in range(100):  # units report what they count from time to time
            if accepted(url):
                break
            until.wait(0.2)
        assert accepted(url) > 0
